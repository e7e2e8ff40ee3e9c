"""Published policy versions: written, verified and loaded by name. torch is imported by the modules, not from here."""

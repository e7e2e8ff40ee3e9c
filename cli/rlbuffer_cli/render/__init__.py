"""How things look: plain lines and tables, rich views, JSON records."""

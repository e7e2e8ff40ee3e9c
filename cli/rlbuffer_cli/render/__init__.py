"""The looks of things: plain lines and tables, rich views, JSON records."""

"""The run on the server: keys, scripts, and one module per concern. Nothing above this room names a Redis command."""

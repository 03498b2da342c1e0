"""The only room that knows streams and events; see ``api`` for what a device is."""

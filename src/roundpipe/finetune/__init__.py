"""The application: config, data, loop, output."""

"""Will it fit, how fast, how long: answered before anything is loaded."""

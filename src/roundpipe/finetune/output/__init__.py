"""What a run leaves and shows: its folder, its files, its terminal."""

"""Tables and plots of what was recorded; reads records, changes nothing."""

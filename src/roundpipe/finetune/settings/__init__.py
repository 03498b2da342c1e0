"""What a run can be told: one name for each setting, and how the keys people bring become ours."""

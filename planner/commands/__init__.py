"""The commands of `checkpoint-planner`: one file for each kind."""

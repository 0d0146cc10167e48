"""Published profiles and hand-written cost graphs as planner input."""

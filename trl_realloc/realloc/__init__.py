"""Where parameters are and how they get elsewhere: `layout` and `schedule` are pure, `transfer` moves."""

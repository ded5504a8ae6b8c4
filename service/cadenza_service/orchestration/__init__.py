"""Jobs as Ray actors: admission, supervisor, controller."""

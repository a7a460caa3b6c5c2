"""Tools beside the library: the command line, plans and forecasts, the doctor, explanations, templates."""

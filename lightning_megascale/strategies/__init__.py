"""Where plan, layout and model meet Lightning."""

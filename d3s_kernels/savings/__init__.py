"""What D3S would save of TRL's update, for any model and batch, counted without a GPU: ``d3s savings``."""

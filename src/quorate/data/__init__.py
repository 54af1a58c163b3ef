"""From lanes to samples: which samples a lane reads at a step, and how they reach it."""

"""The train step, its shardings and optimizer, and the loop around it."""

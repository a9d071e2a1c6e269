"""What a run tells people and keeps: its folder, metrics, a display, and the stored rollouts."""

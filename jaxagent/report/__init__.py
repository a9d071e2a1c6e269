"""What a run tells people and keeps: metrics, a display, and the stored rollouts."""

"""The programs of steps on the device: a step, several decode steps, a whole generation, and scoring."""

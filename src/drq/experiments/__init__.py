"""The paper's experiments and their comparison."""

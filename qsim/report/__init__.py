"""What a person sees: tables, figures, the demo. Measures nothing."""

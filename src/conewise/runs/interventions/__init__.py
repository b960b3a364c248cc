"""What is put in places of a run: interventions, sources of their own, corruptions."""

"""The process that holds the workers' c10d store. Imports torch."""

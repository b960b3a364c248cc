"""The panels of help texts: under which headings options are shown."""

PROMPTS = "The prompts"
CHANGE = "What is changed and read"
FINDING = "How it is found"
RUNNING = "Running"
OUTPUT = "Output"
LOADING = "The model"

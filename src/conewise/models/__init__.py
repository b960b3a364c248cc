"""Models that come with conewise: their files, and where these lie. Nothing here imports torch."""

"""How the nodes of a run meet, and the c10d stores that they and their workers meet at."""

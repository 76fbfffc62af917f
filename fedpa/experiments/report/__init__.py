"""Tables, curves and progress: what people look at."""

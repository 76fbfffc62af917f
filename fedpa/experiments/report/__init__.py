"""Tables, figures, report pages and progress displays."""

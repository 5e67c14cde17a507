"""Reports: tables, sentences, figures, pages, and files for other programs."""

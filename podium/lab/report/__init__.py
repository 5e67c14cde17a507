"""How results are told: tables, sentences, figures, pages, files for other programs."""

"""RULER's thirteen tasks (Hsieh et al. 2024, arXiv 2404.06654): texts, questions and answers of our own by its recipe."""

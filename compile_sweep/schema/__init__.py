"""What is written down: settings, records, labels, objectives and errors, each declared once. No torch, no ray, no pandas."""

"""What results look like: tables as text and HTML, figures. Knows no Gaussian."""

"""Plans and timelines for people: the HTML report, pictures and traces."""

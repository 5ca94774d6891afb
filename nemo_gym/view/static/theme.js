// Before anything is painted, so that no page flashes in the other theme.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch { /* without storage, the system's theme */ }

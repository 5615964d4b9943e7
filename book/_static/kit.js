// Animated pictures get a button that stops them; they stand still from the start for those who asked their system for that.
for (const picture of document.querySelectorAll('.bd-article img[alt^="Animation"]')) {
  const still = document.createElement("canvas");
  const button = document.createElement("button");
  button.type = "button";
  button.className = "motion";
  const source = picture.src;
  const show = (moving) => {
    if (moving) {
      picture.src = source;
    } else {
      still.width = picture.naturalWidth;
      still.height = picture.naturalHeight;
      still.getContext("2d").drawImage(picture, 0, 0);
      picture.src = still.toDataURL();
    }
    button.textContent = moving ? "Stop the animation" : "Play the animation";
    button.onclick = () => show(!moving);
  };
  const begin = () => show(!window.matchMedia("(prefers-reduced-motion: reduce)").matches);
  picture.after(button);
  if (picture.complete) begin();
  else picture.addEventListener("load", begin, { once: true });
}

// A table that is wider than the page can be moved with the keyboard, too.
for (const table of document.querySelectorAll(".bd-article table")) table.tabIndex = 0;

// A picture of a cell leads to itself, alone and as large as it is: on a phone its text is small.
for (const picture of document.querySelectorAll('.cell_output img:not([alt^="Animation"])')) {
  const link = document.createElement("a");
  link.href = picture.src;
  picture.replaceWith(link);
  link.append(picture);
}

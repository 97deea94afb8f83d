// A button that copies what stands in a box of code; where copying is not allowed, the text is selected instead.
document.querySelectorAll("pre.copyable").forEach((box) => {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(box.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(box);
      button.textContent = "Selected: copy it with the keyboard";
    }
  });
  box.after(button);
});

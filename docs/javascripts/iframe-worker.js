// Lets the search work on pages that are opened from a folder, where browsers refuse to start workers.
//
// The worker's script runs in a hidden frame instead. The frame has the part of a worker's interface that the theme uses.
if (location.protocol === "file:") {
  window.Worker = class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const scope = this.frame.contentWindow;
      const page = this.frame.contentDocument;
      page.open(); // keeps Firefox from replacing the empty page, and with it the script, once it has loaded
      page.close();
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = page.createElement("script");
      this.started = new Promise((resolve, reject) => {
        script.onload = () => resolve(scope);
        script.onerror = () => reject(new Error(`${url} cannot be loaded`));
      });
      script.src = new URL(url, location.href);
      page.documentElement.appendChild(script);
    }

    postMessage(data) {
      this.started.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}

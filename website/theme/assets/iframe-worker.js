// Browsers start no workers for pages that are opened from the file system. There, the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.window = frame.contentWindow
      this.window.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      script.src = new URL(url, location.href)
      this.ready = new Promise((loaded) => script.addEventListener("load", loaded))
      frame.contentDocument.body.append(script)
    }
    postMessage(data) {
      this.ready.then(() => this.window.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.window.frameElement.remove()
    }
  }
}

//! Misuses that use what is not the caller's any more, not yet, or not by its own promise.

#![allow(unused)]

use pinpool::{DeviceSlice, PinnedBuf, Pool, Stream};

/// A buffer cannot be read once it was handed to the device.
fn read_after_upload(stream: &Stream, buf: PinnedBuf, to: DeviceSlice) {
    let sent = stream.upload(buf, to).unwrap();
    let _first = buf[0]; //~ E0382
    drop(sent);
}

/// A buffer cannot be written to once it was handed to the device.
fn write_after_upload(stream: &Stream, mut buf: PinnedBuf, to: DeviceSlice) {
    let sent = stream.upload(buf, to).unwrap();
    buf.extend_from_slice(b"late"); //~ E0382
    drop(sent);
}

/// A handle is used up by waiting.
fn handle_after_wait(stream: &Stream, buf: PinnedBuf, to: DeviceSlice) {
    let sent = stream.upload(buf, to).unwrap();
    let back = sent.wait().unwrap();
    sent.is_done().unwrap(); //~ E0382
    drop(back);
}

/// A stream-ready buffer is not shared by two submits.
fn share_stream_ready(pool: &Pool, stream: &Stream, from: DeviceSlice) {
    let landing = pool.checkout_on(stream, 64).unwrap();
    drop(stream.download(&from, landing).unwrap());
    drop(stream.download(&from, landing).unwrap()); //~ E0382
}

/// No slice of a buffer survives its submission.
fn slice_across_submit(stream: &Stream, mut buf: PinnedBuf, to: DeviceSlice) {
    let part = &mut buf[..4];
    let sent = stream.upload(buf, to).unwrap(); //~ E0505
    //= let sent = stream.upload_blocking(part, to).unwrap();
    part[0] = 2;
    drop(sent);
}

/// Two threads cannot write to one buffer.
fn write_from_two_threads(mut buf: PinnedBuf) {
    std::thread::scope(|scope| {
        scope.spawn(|| buf.clear());
        scope.spawn(|| buf.clear()); //~ E0499
    });
}

/// The promise that bytes were written is the caller's, and unsafe to give.
fn set_len(mut buf: PinnedBuf) {
    buf.set_len(4); //~ E0133
    //= unsafe { buf.set_len(4) }; // SAFETY: only compiled.
}

//! Misuses that have no type.

#![allow(unused)]
#![forbid(unsafe_code)]

use std::sync::Arc;

use pinpool::{DeviceSlice, Landing, Lend, PinnedBuf, Pool, Stream};

/// A buffer has one owner.
fn clone_buffer(buf: PinnedBuf) {
    let other: PinnedBuf = buf.clone(); //~ E0599
    //= let other: Vec<u8> = buf.to_vec();
    drop((buf, other));
}

/// A buffer in flight cannot be read before its copy was waited for.
fn read_in_flight(stream: &Stream, buf: PinnedBuf, from: DeviceSlice) {
    let landing = stream.download(from, buf).unwrap();
    let _first = landing[0]; //~ E0608
    //= let _first = landing.wait().unwrap()[0];
}

/// The handle of a download gives no access to its bytes.
fn bytes_of_a_handle(stream: &Stream, buf: PinnedBuf, from: DeviceSlice) {
    let landing = stream.download(from, buf).unwrap();
    let _bytes: &[u8] = landing.as_ref(); //~ E0599
    //= let _bytes: Vec<u8> = landing.wait().unwrap().to_vec();
}

/// The device cannot write to a buffer that has other readers.
fn download_into_shared(stream: &Stream, buf: PinnedBuf, from: DeviceSlice) {
    drop(stream.download(from, Arc::new(buf)).unwrap()); //~ E0277
    //= drop(stream.download(from, buf).unwrap());
}

/// Borrowed memory cannot be sent asynchronously: the caller may free it under the copy.
fn upload_borrowed(stream: &Stream, bytes: &[u8], to: DeviceSlice) {
    stream.upload(bytes, to).unwrap(); //~ E0277
    //= stream.upload_blocking(bytes, to).unwrap();
}

/// Plain memory cannot be sent asynchronously.
fn upload_plain(stream: &Stream, buf: Vec<u8>, to: DeviceSlice) {
    drop(stream.upload(buf, to).unwrap()); //~ E0277
    //= stream.upload_blocking(&buf, to).unwrap();
}

/// The CPU cannot use a stream-ready buffer: earlier work may still read it.
fn touch_stream_ready(pool: &Pool, stream: &Stream) {
    let mut landing = pool.checkout_on(stream, 64).unwrap();
    landing.extend_from_slice(b"mine"); //~ E0599
    //= landing.wait().unwrap().extend_from_slice(b"mine");
}

/// Bytes cannot be viewed as a type that not all bytes are values of.
fn view_as_bool(buf: &PinnedBuf) {
    let _view = buf.view::<bool>().unwrap(); //~ E0277
    //= let _view = buf.view::<f32>().unwrap();
}

/// Only the library calls the methods on a lent buffer: code outside that has the bound cannot release one.
fn sealed_lend<B: Lend>(buf: B) {
    buf.abandon(); //~ E0061
    //= drop(buf);
}

/// The argument that methods of sealed traits take cannot be made by inference either.
fn sealed_key<B: Lend>(buf: B) -> bool {
    buf.finish(None, Default::default()).is_ok() //~ E0277
    //= Some(buf).is_some()
}

/// A stream-ready buffer has no host-ready half before its copy is complete, whatever bound asks for it.
fn sealed_landing<L: Landing>(landing: L) -> usize {
    let both = landing.land(); //~ E0061
    //= let both = (landing,);
    size_of_val(&both)
}

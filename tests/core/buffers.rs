//! What a buffer is by itself, without a copy: its bytes, what fits, how it and other handles print.

use std::io::Write;

use bytes::BufMut;
use pinpool::host::HostNode;
use pinpool::{Device, Error, Pool};

const LEN: usize = 4096;

/// A device, and a pool with room for a few buffers.
fn pool() -> (HostNode, Device, Pool) {
    let (node, device) = crate::host();
    let pool = crate::pool(&device, 1 << 16);
    (node, device, pool)
}

#[test]
fn what_is_written_is_what_there_is() {
    let (_node, _device, pool) = pool();
    let mut buf = pool.checkout(10).unwrap();
    assert_eq!((buf.capacity(), buf.len(), buf.remaining(), buf.is_empty()), (10, 0, 10, true));
    buf.try_resize(3, 7).unwrap();
    assert_eq!((&*buf, buf.remaining(), buf.is_empty()), (&[7; 3][..], 7, false));
    buf.try_resize(5, 8).unwrap();
    assert_eq!(*buf, [7, 7, 7, 8, 8], "what was written before stays");
    buf.try_resize(2, 9).unwrap();
    assert_eq!(*buf, [7, 7]);
    assert!(matches!(buf.try_resize(11, 0), Err(Error::TooSmall { need: 11, have: 10 })));
    assert_eq!((buf.spare_capacity_mut().len(), buf.remaining_mut()), (8, 8));
    buf.put_slice(b"abc");
    assert_eq!(buf.write(b"defghij").unwrap(), 5, "so much still fits");
    assert_eq!(buf.write(b"more").unwrap(), 0);
    assert_eq!(*buf, *b"\x07\x07abcdefgh");
    assert!(matches!(buf.try_extend_from_slice(b"x"), Err(Error::TooSmall { need: 1, have: 0 })));
    buf.truncate(11);
    assert_eq!(buf.len(), 10);
    buf.truncate(4);
    assert_eq!(*buf, *b"\x07\x07ab");
    buf.clear();
    assert_eq!((buf.len(), buf.remaining()), (0, 10));
}

#[test]
fn references_to_a_buffer_are_its_written_bytes() {
    let (_node, device, pool) = pool();
    let mut buf = pool.checkout(LEN).unwrap();
    buf.extend_from_slice(b"hello");
    AsMut::<[u8]>::as_mut(&mut buf)[0] = b'j';
    assert_eq!(AsRef::<[u8]>::as_ref(&buf), b"jello");
    assert_eq!(AsMut::<[u8]>::as_mut(&mut buf), b"jello");
    let registered = device.register(vec![7u8; LEN]).unwrap();
    assert_eq!(AsRef::<[u8]>::as_ref(&registered), [7; LEN]);
    assert_eq!((registered.len(), registered.is_read_only()), (LEN, false));
    assert_eq!(registered.into_inner().unwrap(), [7; LEN]);
}

#[test]
fn handles_print_what_they_are() {
    let (node, device, pool) = pool();
    let stream = device.stream().unwrap();
    let memory = device.alloc(LEN).unwrap();
    let mut buf = pool.checkout(LEN).unwrap();
    buf.extend_from_slice(b"hello");
    assert_eq!(format!("{buf:?}"), "PinnedBuf { len: 5, capacity: 4096, .. }");
    assert_eq!(format!("{stream:?}"), format!("Stream {{ device: {:?}, .. }}", device.name()));
    let landing = pool.checkout_on(&stream, LEN).unwrap();
    assert_eq!(format!("{landing:?}"), "StreamBuf { capacity: 4096, claimed: false }");
    // With nothing else left, the next checkout claims the buffer in flight.
    let mut out = Vec::new();
    while let Ok(buf) = pool.try_checkout(LEN) {
        out.push(buf);
    }
    node.hang(0);
    let sent = stream.upload(buf, &memory).unwrap();
    assert_eq!(format!("{sent:?}"), "InFlight { seq: 1, .. }");
    drop(sent);
    let claimed = pool.checkout_on(&stream, LEN).unwrap();
    assert_eq!(format!("{claimed:?}"), "StreamBuf { capacity: 4096, claimed: true }");
    let registered = device.register_read_only(vec![7u8; LEN]).unwrap();
    assert_eq!(format!("{registered:?}"), "Registered { len: 4096, read_only: true, .. }");
}

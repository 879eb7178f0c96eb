//! What a buffer is by itself, without a copy: its bytes and what fits.

use std::io::Write;

use bytes::BufMut;

use super::*;

#[test]
fn what_is_written_is_what_there_is() {
    let pool = pool(&host().1, 1 << 16);
    let mut buf = pool.checkout(10).unwrap();
    assert_eq!((buf.capacity(), buf.len(), buf.remaining(), buf.is_empty()), (10, 0, 10, true));
    buf.try_resize(3, 7).unwrap();
    assert_eq!((&*buf, buf.remaining(), buf.is_empty()), (&[7; 3][..], 7, false));
    buf.try_resize(5, 8).unwrap();
    assert_eq!(*buf, [7, 7, 7, 8, 8], "what was written before stays");
    buf.try_resize(2, 9).unwrap();
    AsMut::<[u8]>::as_mut(&mut buf)[1] = 6;
    assert_eq!(AsRef::<[u8]>::as_ref(&buf), [7, 6]);
    assert_eq!(AsMut::<[u8]>::as_mut(&mut buf), [7, 6]);
    assert!(matches!(buf.try_resize(11, 0), Err(Error::TooSmall { need: 11, have: 10 })));
    assert_eq!((buf.spare_capacity_mut().len(), buf.remaining_mut()), (8, 8));
    buf.put_slice(b"abc");
    assert_eq!(buf.write(b"defghij").unwrap(), 5, "so much still fits");
    assert_eq!(buf.write(b"more").unwrap(), 0);
    assert_eq!(*buf, *b"\x07\x06abcdefgh");
    assert!(matches!(buf.try_extend_from_slice(b"x"), Err(Error::TooSmall { need: 1, have: 0 })));
    buf.truncate(11);
    assert_eq!(buf.len(), 10);
    buf.truncate(4);
    assert_eq!(*buf, *b"\x07\x06ab");
    buf.clear();
    assert_eq!((buf.len(), buf.remaining()), (0, 10));
}

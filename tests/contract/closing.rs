//! Closing a device: everything is given back by the time that it returns, and the error names what is in the
//! way.

use std::sync::mpsc;

use super::*;

impl Subject {
    /// Closes the devices at the end of a test, when only handles to them are left.
    pub(super) fn close(self) {
        let Self { device, other, .. } = self;
        for device in [Some(device), other].into_iter().flatten() {
            if let Err(error) = device.close(HANG) {
                panic!("{error}");
            }
        }
    }
}

/// Every order in which the things of a program are dropped, with what is in flight by then.
pub(super) fn drops(on: &Subject) {
    let mut pools: Vec<Pool> = Vec::new();
    // Of six things: the pool, the stream, device memory, a buffer, two handles to something in flight. Not
    // every order gets a pool of its own: making one is not what is tested here.
    for n in 0..720 {
        if n % 6 == 0 {
            pools = vec![on.pool(256 << 10)];
        }
        let mut pool = if n % 6 == 5 { pools.pop() } else { pools.first().cloned() };
        let mut stream = Some(on.stream());
        let mut memory = Some(on.alloc(1000));
        let mut flights = {
            let (pool, stream) = (pool.as_ref().unwrap(), stream.as_ref().unwrap());
            let sent = stream.upload(filled(pool, &bytes(n, 1000)), memory.as_ref().unwrap()).unwrap();
            let landing = pool.checkout(1000).unwrap();
            [Some(sent), Some(stream.download(memory.as_ref().unwrap(), landing).unwrap())]
        };
        let mut buf = Some(filled(pool.as_ref().unwrap(), &bytes(n, 10)));
        let (mut left, mut number) = (vec![0, 1, 2, 3, 4, 5], n);
        for count in (1..=6).rev() {
            let what = left.remove(number % count);
            number /= count;
            match what {
                0 => pool = None,
                1 => stream = None,
                2 => memory = None,
                3 => assert!(*buf.take().unwrap() == *bytes(n, 10)),
                4 => drop(flights[0].take()),
                // Whatever is dropped by now, this download still completes.
                _ => assert!(*flights[1].take().unwrap().wait().unwrap() == *bytes(n, 1000), "order {n}"),
            }
        }
        assert!(pool.is_none() && stream.is_none() && memory.is_none());
    }
    assert_eq!(on.device.lost(), None);
}

/// Each thing by itself keeps the device open, and the error says which; then the wait goes on.
pub(super) fn told(on: Subject) {
    let name = on.device.name().to_owned();
    let again = on.device.clone();
    let error = again.close(Duration::ZERO).unwrap_err();
    // The subject's own.
    assert_eq!((error.held_by().handles, error.device(), error.is_closed()), (1, &*name, false), "{error}");

    let (pool, stream, memory) = (on.pool(1 << 20), on.stream(), on.alloc(5000));
    let buf = pool.checkout(3000).unwrap();
    let registered = on.device.register(vec![7_u8; 8192]).ok();
    let Subject { device, other, .. } = on;
    let error = device.close(Duration::ZERO).unwrap_err();
    let held = error.held_by();
    // The handles in the pool and in the stream.
    assert_eq!((held.handles, held.streams, held.busy_streams), (2, 1, 0), "{error}");
    assert_eq!((held.memory_bytes, held.leaked, held.forked), (5000, 0, false), "{error}");
    assert_eq!(held.registered_bytes, registered.as_ref().map_or(0, |_| 8192), "{error}");
    assert!(held.lost.is_none());
    assert_eq!((held.buffers, held.quarantined, held.quarantined_bytes), (1, 0, 0), "{error}");
    for word in [&*name, "still open", "1 buffers out", "1 streams", "5000 bytes of device memory"] {
        assert!(error.to_string().contains(word), "{word}: {error}");
    }

    // Dropped one after the other: a buffer keeps its pool's memory, and that memory the device.
    drop((pool, stream, registered));
    let error = error.wait(Duration::ZERO).unwrap_err();
    assert_eq!((error.held_by().handles, error.held_by().buffers), (0, 1), "{error}");
    drop(buf);
    let error = match error.wait(Duration::from_millis(1)) {
        Err(error) => error,
        Ok(()) => panic!("closed, with device memory allocated"),
    };
    assert_eq!((error.held_by().handles, error.held_by().memory_bytes), (0, 5000), "{error}");
    drop(memory);
    if let Err(error) = error.wait(HANG) {
        panic!("{error}");
    }
    if let Some(Err(error)) = other.map(|other| other.close(HANG)) {
        panic!("{error}");
    }
}

/// Closed with what was dropped only just now, and opened again, it works; where it is still open that is the
/// same device, which then keeps it open.
pub(super) fn again(on: Subject) {
    let (pool, stream, memory) = (on.pool(2 << 20), on.stream(), on.alloc(100_000));
    let sent = bytes(1, 100_000);
    (0..4).for_each(|_| drop(stream.upload(filled(&pool, &sent), &memory).unwrap()));
    drop((stream.hold(filled(&pool, &sent)).unwrap(), on.device.register(vec![7_u8; 8192]).ok()));
    drop((pool, stream, memory));
    let name = on.device.name().to_owned();
    // A device that is moved by hand would be opened as one that moves by itself.
    let Some(same) = Device::open(&name).ok().filter(|_| on.has_threads()) else { return on.close() };
    let error = same.clone().close(Duration::ZERO).unwrap_err();
    assert!(error.held_by().handles >= 1);
    drop((on, same));
    // A device of a node of the test's own is never found by name; then there is nothing to wait for either.
    error.wait(HANG).unwrap();
    let device = Device::open(&name).unwrap();
    let on = Subject::new(device, None);
    copies::bounds_are_kept(&on);
    on.close();
}

/// On a thread of the crate it does not wait for itself. An owner that goes there may use the device.
pub(super) fn from_an_owner(on: Subject) {
    struct Closes(Option<Device>, mpsc::Sender<bool>);
    impl Drop for Closes {
        fn drop(&mut self) {
            let device = self.0.take().unwrap();
            let (stream, memory) = (device.stream().unwrap(), device.alloc(64).unwrap());
            stream.upload_blocking(&[5; 64], &memory).unwrap();
            drop((stream, memory));
            let _ = self.1.send(device.close(HANG).is_err_and(|error| !error.is_closed()));
        }
    }
    let (say, hear) = mpsc::channel();
    let memory = on.alloc(4096);
    // SAFETY: no other code uses it, and it outlives the slice.
    let foreign =
        unsafe { on.device.raw_memory(memory.address(), 4096, Closes(Some(on.device.clone()), say)) };
    match foreign {
        Ok(foreign) => {
            drop(foreign);
            assert!(hear.recv().unwrap(), "closed while others have handles");
        }
        Err(refused) => {
            assert!(!matches!(refused.error, Error::Closed), "{}", refused.error);
            drop(refused);
        }
    }
    drop(memory);
    on.close();
}

//! Forks beside threads that are at work, on the host device and inside of a GPU's driver.

use pinpool::Checkout;

use super::*;

/// Threads of the parent's that have every lock of the crate now and then.
fn busy(device: &Device, [pool, tracked, full]: [&Pool; 3], bulk: &Copier, stop: &AtomicBool) {
    let (stream, memory) = (device.stream().unwrap(), device.alloc(1 << 20).unwrap());
    let mut i = 0;
    while !stop.load(Ordering::Relaxed) {
        i += 1;
        // Of this one a child's task waits for memory.
        (0..20).for_each(|_| _ = full.stats());
        let from = if i % 5 == 0 { tracked } else { pool };
        if let Ok(mut buf) = from.checkout_timeout(1 + i * 7919 % 400_000, Duration::from_millis(5)) {
            let len = buf.capacity();
            buf.try_resize(len, 1).unwrap();
            let sent = stream.upload(buf, memory.slice(..len)).unwrap();
            if i % 3 == 0 {
                drop(sent.wait_timeout(Duration::from_millis(5)));
            }
        }
        drop(bulk.upload(vec![1; 64], memory.slice(..64)));
        if i % 16 == 0 {
            bulk.upload_slice(&[1; 100_000], memory.slice(..100_000)).unwrap();
            pool.trim(1 << 20);
            drop((pool.snapshot(), pool.stuck(Duration::ZERO), device.register(vec![1_u8; 9000])));
        }
    }
}

fn poll(waiting: &mut Checkout) -> Poll<Result<PinnedBuf, Error>> {
    Pin::new(waiting).poll(&mut Context::from_waker(Waker::noop()))
}

/// What a child does with what it inherited, by turns.
fn child(
    turn: usize,
    (device, pool, tracked, bulk): (Device, Pool, Pool, Copier),
    (stream, memory): (Stream, DeviceSlice),
    held: PinnedBuf,
    mut waiting: Checkout,
    rest: impl Sized,
) -> i32 {
    let refused = first_wrong(&[
        is_forked(pool.try_checkout(100)),
        is_forked(pool.checkout(100)),
        is_forked(tracked.checkout_timeout(5, Duration::MAX)),
        is_forked(pool.checkout_many(&[Request::new(5)], None)),
        is_forked(pool.try_checkout_on(&stream, 10)),
        is_forked(device.stream()),
        is_forked(device.register(vec![1_u8; 5000]).map(drop).map_err(|e| e.error)),
        is_forked(Device::open("host")),
        // A task that waits in the parent.
        matches!(poll(&mut waiting), Poll::Ready(Err(Error::Forked))),
    ]);
    if refused != 0 {
        return refused;
    }
    let wrong = match turn % 6 {
        0 => {
            drop((held, rest, bulk, stream, memory, pool, tracked));
            !device.close(Duration::MAX).is_err_and(|error| error.held_by().forked)
        }
        1 => {
            let sent = bulk.upload(held.to_vec(), memory.slice(..10)).map_err(|refused| refused.error);
            let slice = bulk.upload_slice(&[1; 10], memory.slice(..10));
            !(is_forked(stream.synchronize()) && is_forked(sent) && is_forked(slice))
        }
        2 => {
            let again =
                forked(|| i32::from(!is_forked(pool.try_checkout(5)) || !is_forked(Device::open("host"))));
            again != Some(0)
        }
        3 => {
            let sampler = Sampler::new(&pool).pool(&tracked);
            let looked = (pool.stats(), pool.snapshot(), device.stats(), stream.stats());
            let empty =
                looked.0.pinned_bytes == 0 && pool.pinning().ready == 0 && looked.2.streams.is_empty();
            let none =
                pool.stuck(Duration::ZERO).is_empty() && pool.regions().is_empty() && pool.trim(0) == 0;
            let ended = pool.shutdown(Duration::MAX).drained || pool.check().is_ok() || device.reap();
            let told = is_forked(pool.wait_pinned(None)) && is_forked(sampler.spawn(Duration::from_secs(1)));
            !empty || !none || ended || !told || held.is_pinned() || format!("{pool:?}").is_empty()
        }
        4 => {
            // Threads of the child can use no more than it can, and their thread-locals are destroyed as ever.
            std::thread::scope(|scope| {
                let asks = || is_forked(pool.try_checkout(7)) && is_forked(pool.clone().checkout(7));
                let all: Vec<_> = (0..4).map(|_| scope.spawn(asks)).collect();
                all.into_iter().any(|asked| !asked.join().unwrap_or(false))
            })
        }
        _ => {
            // Ends by the process's normal exit, in which the thread's caches are destroyed, and what is left here.
            std::mem::forget((held, rest));
            std::process::exit(0)
        }
    };
    if wrong { 20 + (turn % 6) as i32 } else { 0 }
}

/// Forks beside threads that are at work: whatever locks these hold at the fork, the child waits for none of them.
#[test]
fn no_child_hangs_whatever_the_threads_are_doing() {
    own_process!();
    let device = &host().1;
    let pool = builder(device, 8 << 20).region(1 << 20).initial(1 << 20).build().unwrap();
    let tracked = builder(device, 2 << 20).track_checkouts(true).build().unwrap();
    let full = builder(device, 64 << 10).build().unwrap();
    let all_of_it = full.checkout(60 << 10).unwrap();
    let bulk = Copier::builder(&pool, device).threads(2).chunk(64 << 10).share(1 << 20).build().unwrap();
    let sampling = Sampler::new(&pool).pool(&tracked).spawn(Duration::from_millis(10)).unwrap();
    let sampling = Cell::new(Some(sampling));
    let stop = AtomicBool::new(false);
    let wrong = std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| busy(device, [&pool, &tracked, &full], &bulk, &stop));
        }
        let wrong = (0..102).find_map(|round| {
            // The child has the last handles to these.
            let (stream, memory) = (device.stream().unwrap(), device.alloc(300_000).unwrap());
            // The stream's thread is at work by then: one that is just starting may hold a lock of the standard library's,
            // without which no child can start a thread.
            drop(stream.upload(filled(&pool, 10, 1), memory.slice(..10)).unwrap().wait().unwrap());
            let held = pool.checkout_timeout(1000, HANG).unwrap();
            let sent = stream.upload(filled(&pool, 1000, 1), memory.slice(..1000)).unwrap();
            let landing = pool.try_checkout_on(&stream, 500);
            let others = (stream.hold(filled(&pool, 1000, 2)).unwrap(), pool.try_checkout(300_000));
            let transfer = bulk.upload(vec![1_u8; 300_000], memory.slice(..300_000)).unwrap();
            let mut waiting = full.checkout_async(60 << 10);
            assert!(poll(&mut waiting).is_pending());
            let all = Cell::new(Some((
                (device.clone(), pool.clone(), tracked.clone(), bulk.clone()),
                (stream, memory),
                held,
                waiting,
                (sent, landing, pool.checkout_async(500), transfer, others),
            )));
            let code = forked(|| {
                let (whole, made, held, waiting, rest) = all.take().unwrap();
                child(round, whole, made, held, waiting, (rest, sampling.take()))
            });
            (code != Some(0)).then_some((round, code))
        });
        stop.store(true, Ordering::Relaxed);
        wrong
    });
    assert_eq!(
        wrong, None,
        "the round, and how the child ended: 20 and more, by its turn; None: it hangs or died"
    );
    drop((sampling, all_of_it));
    [pool, tracked, full].iter().for_each(|pool| _ = checked(pool));
}

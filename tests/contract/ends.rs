//! Everything dropped in every order, and many threads at once.

use super::*;

pub fn drops(on: &Subject) {
    // Every order of six things: the pool, the stream, device memory, a buffer, two handles to something in flight.
    fn orders(left: &mut Vec<usize>, order: &mut Vec<usize>, all: &mut Vec<Vec<usize>>) {
        if left.is_empty() {
            all.push(order.clone());
        }
        for at in 0..left.len() {
            let one = left.remove(at);
            order.push(one);
            orders(left, order, all);
            order.pop();
            left.insert(at, one);
        }
    }
    let mut all = Vec::new();
    orders(&mut (0..6).collect(), &mut Vec::new(), &mut all);
    assert_eq!(all.len(), 720);
    let mut pools: Vec<Pool> = Vec::new();
    // Not every order gets a pool of its own: making one is not what is tested here.
    for (n, order) in all.into_iter().enumerate() {
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
        for what in order {
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

pub fn threads(on: &Subject) {
    let count = if on.has_threads() { 4 } else { 1 };
    let pool = on.pool(2 << 20);
    let streams = [on.stream(), on.stream()];
    std::thread::scope(|scope| {
        for thread in 0..count {
            let (pool, streams) = (&pool, &streams);
            scope.spawn(move || {
                let memory = on.alloc(40_000);
                for round in 0..60 {
                    let len = 1 + (round * 977 + thread * 131) % 40_000;
                    let sent = bytes(thread * 1000 + round, len);
                    let stream = &streams[(thread + round) % 2];
                    drop(stream.upload(filled(pool, &sent), &memory).unwrap());
                    let landing = pool.checkout_on(stream, len).unwrap();
                    let back = stream.download(memory.slice(..len), landing).unwrap().wait().unwrap();
                    assert!(*back == *sent, "thread {thread}, round {round}");
                }
            });
        }
    });
    streams.iter().for_each(|s| s.synchronize().unwrap());
    let stats = pool.stats();
    assert_eq!((stats.in_flight_bytes, stats.checked_out_bytes), (0, 0), "{stats:?}");
    pool.check().unwrap();
}

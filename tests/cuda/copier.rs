//! The copier on a GPU: pieces through the device ring and the kernels, against a plain model; and what only a GPU's
//! driver can do to it.
//!
//! What needs no kernel is in `copy/pieces.rs`, on host devices.

use std::ops::Range;
use std::time::{Duration, Instant};

use pinpool::copier::{FileSource, Reading, Transfer};
use pinpool::{Copier, Device, DeviceSlice, Error, PinnedBuf, Pool, Unpinned};
use tempfile::NamedTempFile;

use crate::rig::open;
use crate::support::doubles::HANG;
use crate::support::doubles::gpu::{all_back, filled, on_gpu, on_stand_in, until};
use crate::support::{bytes, downloaded};

const MEMORY: usize = 24 << 20;

/// Random numbers, the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        bytes(self.below(1 << 30), len)
    }
}

struct Bench {
    device: Device,
    pool: Pool,
    copier: Copier,
    memory: DeviceSlice,
    /// What is there.
    model: Vec<u8>,
}

impl Bench {
    fn new(ring: usize) -> Self {
        let device = open();
        let pool = Pool::builder(&device).capacity(96 << 20).unpinned(Unpinned::Allow).build().unwrap();
        let copier = Copier::builder(&pool, &device).threads(3).ring(ring).build().unwrap();
        let memory = device.alloc(MEMORY).unwrap();
        let model = vec![0xEE; MEMORY];
        device.stream().unwrap().upload_blocking(&model, &memory).unwrap();
        Self { device, pool, copier, memory, model }
    }

    /// Places on the device that do not overlap: `len` gives their lengths, until the memory is full.
    fn places(
        &self,
        random: &mut Random,
        count: usize,
        len: impl Fn(&mut Random) -> usize,
    ) -> Vec<(usize, usize)> {
        let mut places = Vec::new();
        let mut at = random.below(64);
        while places.len() < count {
            let len = len(random);
            if at + len > MEMORY {
                break;
            }
            places.push((at, len));
            // Neighbours now and then.
            at += len + if random.below(4) == 0 { 0 } else { random.below(200) };
        }
        for i in (1..places.len()).rev() {
            places.swap(i, random.below(i + 1));
        }
        places
    }

    fn slice(&self, (at, len): (usize, usize)) -> DeviceSlice {
        self.memory.slice(at..at + len).unwrap()
    }

    fn is_as_modelled(&self, case: &str) {
        let mut there = vec![0; MEMORY];
        self.device.stream().unwrap().download_blocking(&self.memory, &mut there).unwrap();
        if there != self.model {
            let first = there.iter().zip(&self.model).position(|(a, b)| a != b);
            panic!("{case}: wrong bytes, the first at {first:?}");
        }
    }

    /// Uploads and downloads borrowed pieces.
    fn pieces(&mut self, random: &mut Random, places: &[(usize, usize)], case: &str) {
        let sources: Vec<Vec<u8>> = places.iter().map(|(_, len)| random.bytes(*len)).collect();
        let pieces: Vec<(&[u8], DeviceSlice)> =
            sources.iter().zip(places).map(|(bytes, place)| (&bytes[..], self.slice(*place))).collect();
        self.copier.upload_slices(&pieces).unwrap();
        for (bytes, (at, len)) in sources.iter().zip(places) {
            self.model[*at..at + len].copy_from_slice(bytes);
        }
        self.is_as_modelled(case);
        let mut back: Vec<Vec<u8>> = places.iter().map(|(_, len)| vec![0x11; len + 3]).collect();
        let mut targets: Vec<(DeviceSlice, &mut [u8])> =
            places.iter().zip(&mut back).map(|(place, bytes)| (self.slice(*place), &mut bytes[..])).collect();
        self.copier.download_slices(&mut targets).unwrap();
        for (n, (there, here)) in back.iter().zip(&sources).enumerate() {
            assert!(
                there[..here.len()] == here[..],
                "{case}: piece {n} of {} bytes came back wrong",
                here.len()
            );
            assert!(there[here.len()..] == [0x11; 3], "{case}: piece {n}: written behind its end");
        }
        self.is_as_modelled(case);
    }

    /// Uploads and downloads pinned blocks of pages.
    fn pages(&mut self, random: &mut Random, places: &[(usize, usize)], per_block: usize, case: &str) {
        let blocks: Vec<&[(usize, usize)]> = places.chunks(per_block).collect();
        let filled: Vec<(PinnedBuf, Vec<DeviceSlice>)> = blocks
            .iter()
            .map(|places| {
                let bytes = random.bytes(places.iter().map(|(_, len)| len).sum());
                let mut at = 0;
                for (place, len) in places.iter() {
                    self.model[*place..place + len].copy_from_slice(&bytes[at..at + len]);
                    at += len;
                }
                let mut buf = self.pool.checkout(bytes.len()).unwrap();
                buf.extend_from_slice(&bytes);
                (buf, places.iter().map(|place| self.slice(*place)).collect())
            })
            .collect();
        let sent = self.copier.upload_pages(filled).unwrap();
        assert!(sent.wait_landed(sent.progress().total), "{case}");
        let came = sent.wait().unwrap();
        assert_eq!(came.len(), blocks.len());
        let expected: Vec<Vec<u8>> = came.iter().map(|buf| buf.to_vec()).collect();
        drop(came);
        self.is_as_modelled(case);
        let landings = blocks
            .iter()
            .zip(&expected)
            .map(|(places, bytes)| {
                let landing = self.pool.checkout(bytes.len() + 5).unwrap();
                (places.iter().map(|place| self.slice(*place)).collect::<Vec<_>>(), landing)
            })
            .collect();
        let came = self.copier.download_pages(landings).unwrap().wait().unwrap();
        for (n, (buf, bytes)) in came.iter().zip(&expected).enumerate() {
            assert!(**buf == **bytes, "{case}: block {n} of {} bytes came back wrong", bytes.len());
        }
    }
}

/// A block's places in several allocations in alternation, whose handles are dropped at once.
#[test]
fn pages_keep_all_their_memory() {
    on_gpu(|_| {
        const PAGE: usize = 4096;
        const COUNT: usize = 40;
        let Bench { device, pool, copier, .. } = Bench::new(16 << 20);
        for round in 0..4 {
            let all = [0, 1, 2].map(|_| device.alloc(COUNT * PAGE).unwrap());
            let place = |n: usize| all[n % 3].slice(n / 3 * PAGE..(n / 3 + 1) * PAGE).unwrap();
            let places: Vec<DeviceSlice> = (0..3 * COUNT).map(place).collect();
            let sent = bytes(round, 3 * COUNT * PAGE);
            let up = copier.upload_pages(vec![(filled(&pool, &sent), places.clone())]).unwrap();
            drop(all);
            drop(up.wait().unwrap());
            let landing = pool.checkout(sent.len()).unwrap();
            let back = copier.download_pages(vec![(places, landing)]).unwrap().wait().unwrap();
            assert!(*back[0] == *sent, "round {round}");
        }
    });
}

/// Pieces of all lengths and alignments, by the ring and without it.
#[test]
fn pieces_and_pages_of_any_length_are_in_their_places() {
    on_gpu(|gpu| {
        // The simulation has no kernels of its own to get wrong.
        let part = if gpu.stand_in.is_some() { 4 } else { 1 };
        for ring in [64 << 20, 0] {
            let mut b = Bench::new(ring);
            let mut random = Random(7);
            type Length = fn(&mut Random) -> usize;
            let cases: [(&str, usize, Length); 5] = [
                ("short", 4000, |random| 1 + random.below(200)),
                ("of 1 KiB", 8000, |_| 1 << 10),
                ("of any length", 600, |random| 1 + random.below(40_000)),
                ("of 16 KiB", 1000, |_| 16 << 10),
                ("long among short ones", 300, |random| {
                    if random.below(20) == 0 { 300_000 } else { 1 + random.below(5000) }
                }),
            ];
            for (case, count, len) in cases {
                let case = format!("{case}, ring of {ring}");
                let places = b.places(&mut random, count / part, len);
                b.pieces(&mut random, &places, &case);
                b.pages(&mut random, &places, 37, &case);
            }
            // One block that is longer than a chunk.
            let places = b.places(&mut random, 900, |_| 12_000);
            b.pages(&mut random, &places, 900, "a long block");
            let stats = b.copier.stats();
            if ring == 0 {
                assert_eq!((stats.ring_bytes, stats.launches), (0, 0), "{stats:?}");
            } else {
                assert!(stats.has_kernels, "{stats:?}");
                assert!(stats.ring_bytes > (40 << 20) / part as u64 && stats.launches > 0, "{stats:?}");
                assert!(stats.ring <= 64 << 20, "{stats:?}");
            }
            all_back(&b.pool);
            drop(b.copier);
        }
    });
}

/// The ring is given back when it was unused for a while, and taken again.
#[test]
fn an_idle_ring_is_given_back() {
    on_gpu(|_| {
        let mut b = Bench::new(32 << 20);
        let mut random = Random(3);
        let places = b.places(&mut random, 2000, |_| 1 << 10);
        for round in 0..2 {
            let before = b.copier.stats().ring_bytes;
            b.pieces(&mut random, &places, "idle ring");
            // On a busy machine the ring may have been given back by now.
            assert!(b.copier.stats().ring_bytes > before, "round {round}");
            let since = Instant::now();
            while b.copier.stats().ring > 0 {
                assert!(since.elapsed() < HANG, "the ring is never given back");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    });
}

/// A file of these bytes, and a load of a part of it.
fn load(
    b: &Bench,
    bytes: &[u8],
    reading: Reading,
    part: Range<usize>,
) -> (NamedTempFile, Transfer<FileSource>) {
    let file = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).or_else(|_| NamedTempFile::new()).unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let source = FileSource::open(file.path()).unwrap().reading(reading);
    let source = source.range(part.start as u64..part.end as u64).unwrap();
    let load = b.copier.upload(source, b.memory.slice(..part.len())).unwrap();
    (file, load)
}

/// In every way of reading; cancelled anywhere; cut off anywhere; with a driver's call that fails.
#[test]
fn a_load_of_a_file_is_whole_or_an_error_and_leaves_nothing() {
    on_gpu(|gpu| {
        const LEN: usize = (6 << 20) + 4321;
        const LEFT: u64 = 1_234_567;
        let b = Bench::new(0);
        let b = Bench { copier: Copier::builder(&b.pool, &b.device).chunk(256 << 10).build().unwrap(), ..b };
        let sent = bytes(2, LEN);
        for reading in [Reading::Auto, Reading::Buffered, Reading::Direct] {
            for part in [0..LEN, 4097..LEN - 5] {
                load(&b, &sent, reading, part.clone()).1.wait().unwrap();
                assert!(downloaded(&b.copier, b.memory.slice(..part.len())) == sent[part], "{reading:?}");
            }
        }
        let (mut cancelled, mut cut) = (0, 0);
        for round in 0..40 {
            let (file, load) = load(&b, &sent, Reading::Auto, 0..LEN);
            let (since, done) = (Instant::now(), round * LEN as u64 / 50);
            while load.progress().done < done && !load.is_over() {
                assert!(since.elapsed() < HANG, "{:?}", load.progress());
                std::thread::yield_now();
            }
            match round % 4 {
                0 => load.cancel(),
                1 => {
                    load.cancel();
                    drop(load);
                    continue;
                }
                _ => file.as_file().set_len(LEFT).unwrap(),
            }
            let _ = load.wait_landed(u64::MAX);
            let right = load.progress().landed_to.min(LEN as u64) as usize;
            match load.wait().map_err(|failed| failed.error) {
                Ok(_) => assert_eq!(right, LEN),
                Err(Error::Cancelled { .. }) => cancelled += 1,
                Err(Error::Read { offset: LEFT, kind: std::io::ErrorKind::UnexpectedEof, .. }) => cut += 1,
                Err(other) => panic!("{other}"),
            }
            assert!(right == 0 || downloaded(&b.copier, b.memory.slice(..right)) == sent[..right], "{round}");
        }
        assert!(cancelled > 0 && cut > 0);
        let mut failed = 0;
        for call in ["cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventQuery"] {
            let Some(d) = &gpu.stand_in else { break };
            for nth in [1, 4, 11, 17] {
                // Out of memory, once.
                d.fail(call, nth, 2, false);
                let loaded = load(&b, &sent, Reading::Auto, 0..LEN).1.wait().map_err(|failed| failed.error);
                d.calm();
                match loaded {
                    Ok(_) => assert!(downloaded(&b.copier, b.memory.slice(..LEN)) == sent, "{call} {nth}"),
                    Err(Error::Transfer { .. }) => failed += 1,
                    Err(other) => panic!("{call} {nth}: {other}"),
                }
                all_back(&b.pool);
            }
        }
        assert!(failed > 0 || gpu.stand_in.is_none(), "copies that are refused are errors");
        assert_eq!(b.pool.stats().quarantined_bytes, 0);
        let Bench { device, pool, copier, memory, .. } = b;
        drop((memory, copier));
        until("all is unregistered", || device.registered_bytes() == 0);
        all_back(&pool);
    });
}

/// Kernels that cannot be loaded, and device memory that is too short for the ring: pieces go in batches.
#[test]
fn without_kernels_or_memory_pieces_go_in_batches() {
    on_stand_in(|_, d| {
        let mut random = Random(5);
        let _ = open();
        d.fail("cuModuleLoadData", 1, 218, false);
        let mut b = Bench::new(64 << 20);
        let places = b.places(&mut random, 3000, |_| 1 << 10);
        b.pieces(&mut random, &places, "no kernels");
        let stats = b.copier.stats();
        assert!(!stats.has_kernels && stats.ring_bytes == 0 && stats.batch_bytes > 0, "{stats:?}");
        all_back(&b.pool);
    });
}

/// Streams that are lost keep the slots of what was in flight there. Calls that are refused after that keep none, so no
/// ring is allocated in place of one that has none left.
#[test]
fn refused_calls_keep_no_device_memory() {
    on_stand_in(|_, d| {
        const RING: usize = 8 << 20;
        let Bench { device, pool, memory, .. } = Bench::new(0);
        let copier =
            Copier::builder(&pool, &device).threads(3).depth(1).chunk(1 << 20).ring(RING).build().unwrap();
        let bytes = vec![1; 1 << 10];
        let places: Vec<_> =
            (0..2000).map(|n| memory.slice(n << 11..(n << 11) + bytes.len()).unwrap()).collect();
        let up = || {
            let pieces = places.iter().map(|place| (&bytes[..], place.clone()));
            copier.upload_slices(&pieces.collect::<Vec<_>>())
        };
        let down = || {
            let mut back = vec![bytes.clone(); places.len()];
            let pieces = places.iter().cloned().zip(back.iter_mut().map(|back| &mut back[..]));
            copier.download_slices(&mut pieces.collect::<Vec<_>>())
        };
        up().unwrap();
        down().unwrap();
        // More than there are attempts on all streams.
        (1..=10_000).for_each(|nth| d.fail("cuEventRecord", nth, 1, false));
        for _ in 0..100 {
            up().unwrap_err();
            down().unwrap_err();
        }
        assert!(copier.stats().ring_bytes > 20 << 20, "{:?}", copier.stats());
        drop((places, memory, copier, pool));
        let error = device.close(HANG).unwrap_err();
        assert!(error.held_by().memory_bytes < MEMORY + 5 * RING, "{error}");
    });
}

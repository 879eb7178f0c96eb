//! A host tier for a paged cache of keys and values: blocks that the device has no room for stay in pinned memory.
//!
//! A block has the keys and values of a few tokens: on the device one page in each of 64 planes (32 layers, keys and
//! values), in pinned memory one buffer for each *part*: some layers, the fewer the earlier they are needed, but 64 KiB at
//! least, since short copies are slow. A hash of the tokens names the block. Requests *lease* blocks:
//!
//! - Blocks that the device has are used where they are.
//! - Blocks that the host has are loaded, each part by a transfer of its own, the first layers of all blocks first.
//!   [`Lease::layer`] waits for one layer, so that its kernels run while the last layers are still on the link.
//! - The others the request computes, and [`Lease::release`] makes them known.
//!
//! A block is evicted for another when it is unused for longest, no request has it, and the device is done with it: a
//! [hold](Stream::hold) of each stream that used it tells. Its bytes go to the host first, unless they are there.
//!
//! `cargo run --release --example kv_tier -- cuda:0` (without a name: the first device there is, or the host device).

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use pinpool::copier::Transfer;
use pinpool::{Copier, Device, DeviceSlice, Error, InFlight, PinnedBuf, Pool, Result, Stream, StridedSlice};

/// Layers of the model.
pub const LAYERS: usize = 32;
/// Planes of each layer: keys and values.
pub const PLANES: usize = 2;
/// Bytes of the first part, and of a part at most: the driver takes nearly as long to accept 64 KiB as the link does.
const SHORT: usize = 64 << 10;
const LONG: usize = 256 << 10;
/// Blocks that one transfer stores: the next list is made while the one before is on the link.
const TOGETHER: usize = 32;

/// What names a block: a hash of its tokens and of all before them.
pub type Hash = u64;
/// A block's place in each plane.
type Place = usize;

/// The tier.
pub struct Tier {
    /// Plane behind plane: by layer, then keys and values. Each has a page for each place.
    cache: DeviceSlice,
    page: usize,
    /// Bytes of a plane.
    plane: usize,
    /// The layers of each part.
    parts: Vec<Range<usize>>,
    pool: Pool,
    copier: Copier,
    /// For tests: what a place is filled with before another block gets it.
    poison: Option<u8>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    places: Vec<Used>,
    on_device: HashMap<Hash, Place>,
    on_host: HashMap<Hash, HostBlock>,
    /// Counts leases: what is used least recently has the lowest number.
    now: u64,
    /// Blocks loaded, and stored.
    counts: (u64, u64),
}

/// What uses a place.
#[derive(Default)]
struct Used {
    hash: Option<Hash>,
    leases: usize,
    last: u64,
    /// The block's load, and the work of streams that used it.
    load: Option<Arc<Load>>,
    work: Vec<Arc<InFlight<()>>>,
}

struct HostBlock {
    parts: Vec<Arc<PinnedBuf>>,
    last: u64,
}

/// The transfer of each part.
struct Load(Vec<Transfer<Vec<Arc<PinnedBuf>>>>, OnceLock<bool>);

/// Blocks that a request uses. If it is dropped and not released, its blocks stay where they are for ever: what the
/// device does with them is unknown.
pub struct Lease<'a> {
    tier: &'a Tier,
    blocks: Vec<Leased>,
    loads: Vec<Arc<Load>>,
}

struct Leased {
    hash: Hash,
    place: Place,
    is_new: bool,
}

impl Used {
    /// Whether neither a request nor the device uses it. An error of the device is none of "done".
    fn is_idle(&self) -> bool {
        let is_done = |work: &Arc<InFlight<()>>| matches!(work.is_done(), Ok(true));
        self.leases == 0 && self.load.is_none() && self.work.iter().all(is_done)
    }
}

impl Load {
    /// Whether all of it has come. `None`: it is under way.
    fn has_come(&self) -> Option<bool> {
        let is_over = self.1.get().is_some() || self.0.iter().all(Transfer::is_over);
        let come = || self.0.iter().map(Transfer::progress).all(|part| part.done == part.total);
        is_over.then(|| *self.1.get_or_init(come))
    }
}

impl Tier {
    /// Room for `blocks` blocks on the device, with pages of `page` bytes. The pool is for the host's blocks alone, with
    /// room for all that are leased at once. The copier has its own, since blocks do not go before copies need memory.
    pub fn new(pool: &Pool, copier: Copier, blocks: usize, page: usize, poison: Option<u8>) -> Result<Self> {
        let device = copier.device();
        let plane = blocks * page;
        let cache = device.alloc(LAYERS * PLANES * plane)?;
        let places = (0..blocks).map(|_| Used::default()).collect();
        let layers = |bytes: usize| (bytes / (PLANES * page)).clamp(1, LAYERS);
        // At most as many layers as there are before, so that the first ones come soon.
        let next = |at: usize| (at < LAYERS).then(|| at..LAYERS.min(at + at.min(layers(LONG))));
        let parts = std::iter::successors(Some(0..layers(SHORT)), |part| next(part.end)).collect();
        let state = Mutex::new(State { places, ..State::default() });
        Ok(Self { cache, page, plane, parts, pool: pool.clone(), copier, poison, state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks loaded from the host, and stored there.
    pub fn counts(&self) -> (u64, u64) {
        self.state().counts
    }

    /// The pages of these layers of a block.
    fn pages(&self, layers: Range<usize>, place: Place) -> Result<StridedSlice> {
        let first = layers.start * PLANES * self.plane + place * self.page;
        self.cache.strided(first..first + self.page, self.plane, layers.len() * PLANES)
    }

    /// Leases these blocks for work on `stream`. `None`: too many places are in use now.
    pub fn lease(&self, hashes: &[Hash], stream: &Stream) -> Result<Option<Lease<'_>>> {
        let mut lease = Lease { tier: self, blocks: Vec::new(), loads: Vec::new() };
        let Some((mut free, evicted)) = self.take_places(hashes) else { return Ok(None) };
        let stored = self.store(&free, &evicted);
        let mut state = self.state();
        let now = state.now;
        let stored = stored.inspect_err(|_| state.give(&free))?;
        state.counts.1 += stored.len() as u64;
        state.on_host.extend(stored.into_iter().map(|(hash, parts)| (hash, HostBlock { parts, last: now })));
        let mut loading = Vec::new();
        for &hash in hashes {
            // Another request may have brought it meanwhile, or it is there twice.
            let twice = || lease.blocks.iter().find(|block| block.hash == hash).map(|block| block.place);
            let known = state.on_device.get(&hash).copied().or_else(twice);
            let Some(place) = known.or_else(|| free.pop()) else {
                // It was there, and is gone: others took the place. The caller asks again.
                state.end(&lease.blocks);
                return Ok(None);
            };
            let on_host =
                known.is_none() && state.on_host.get_mut(&hash).map(|block| block.last = now).is_some();
            let used = &mut state.places[place];
            // Another's place is leased by `take_places`.
            used.leases += usize::from(known.is_some());
            used.last = now;
            if on_host {
                loading.push((hash, place));
            }
            lease.blocks.push(Leased { hash, place, is_new: known.is_none() && !on_host });
        }
        state.give(&free);
        if !loading.is_empty() {
            self.load(&mut state, &loading).inspect_err(|_| state.end(&lease.blocks))?;
            state.counts.0 += loading.len() as u64;
        }
        // Behind the work of other streams that computed blocks, and with the loads of other requests.
        for Leased { place, .. } in &lease.blocks {
            let used = &state.places[*place];
            used.work.iter().try_for_each(|work| stream.wait_for_copy(work))?;
            let is_known = |load: &Arc<Load>| lease.loads.iter().any(|known| Arc::ptr_eq(known, load));
            lease.loads.extend(used.load.clone().filter(|load| !is_known(load)));
        }
        Ok(Some(lease))
    }

    /// A place for each block that the device lacks, and the blocks that were there. The places are leased.
    fn take_places(&self, hashes: &[Hash]) -> Option<(Vec<Place>, Vec<Option<Hash>>)> {
        let mut state = self.state();
        (0..state.places.len()).for_each(|place| state.end_load(place));
        let State { places, on_device, now, .. } = &mut *state;
        *now += 1;
        let wanted: HashSet<Hash> = hashes.iter().copied().collect();
        let missing = wanted.iter().filter(|hash| !on_device.contains_key(hash)).count();
        let is_wanted = |used: &Used| used.hash.is_some_and(|hash| wanted.contains(&hash));
        let mut idle: Vec<Place> =
            (0..places.len()).filter(|&n| !is_wanted(&places[n]) && places[n].is_idle()).collect();
        idle.sort_by_key(|&n| places[n].last);
        if idle.len() < missing {
            return None;
        }
        idle.truncate(missing);
        let take = |&n: &Place| {
            let hash = places[n].hash.take();
            hash.and_then(|hash| on_device.remove(&hash));
            places[n] = Used { leases: 1, last: *now, ..Used::default() };
            hash
        };
        let evicted = idle.iter().map(take).collect();
        Some((idle, evicted))
    }

    /// Stores the blocks that were in these places and that the host does not have.
    fn store(&self, places: &[Place], evicted: &[Option<Hash>]) -> Result<Vec<(Hash, Vec<Arc<PinnedBuf>>)>> {
        let evicted = places.iter().zip(evicted).filter_map(|(place, hash)| Some((*place, (*hash)?)));
        let is_new = |(_, hash): &(Place, Hash)| !self.state().on_host.contains_key(hash);
        let blocks: Vec<(Place, Hash)> = evicted.filter(is_new).collect();
        let (mut transfers, mut stored) = (Vec::new(), Vec::new());
        for blocks in blocks.chunks(TOGETHER) {
            let mut pages = Vec::new();
            for (place, _) in blocks {
                for part in &self.parts {
                    pages.push((self.pages(part.clone(), *place)?, self.host_buffer(part.len())?));
                }
            }
            transfers.push((blocks, self.copier.download_pages(pages)?));
        }
        for (blocks, transfer) in transfers {
            let mut parts = transfer.wait()?.into_iter().map(Arc::new);
            let mut block = || parts.by_ref().take(self.parts.len()).collect();
            stored.extend(blocks.iter().map(|(_, hash)| (*hash, block())));
        }
        let poison = self.poison.map(|byte| vec![byte; self.page]);
        for (bytes, place) in poison.iter().flat_map(|bytes| places.iter().map(move |place| (bytes, place))) {
            let pages = self.pages(0..LAYERS, *place)?;
            (0..pages.count()).try_for_each(|n| self.copier.upload_slice(bytes, pages.get(n)))?;
        }
        Ok(stored)
    }

    /// A buffer for some layers of a block. In a full pool the host's oldest blocks make room, and then loads that end.
    fn host_buffer(&self, layers: usize) -> Result<PinnedBuf> {
        let len = layers * PLANES * self.page;
        match self.pool.try_checkout(len) {
            Err(Error::Exhausted(_)) if self.state().forget() => self.host_buffer(layers),
            Err(Error::Exhausted(_)) => self.pool.checkout(len),
            said => said,
        }
    }

    /// Begins to load these blocks, part by part.
    fn load(&self, state: &mut State, blocks: &[(Hash, Place)]) -> Result<()> {
        let mut load = Load(Vec::new(), OnceLock::new());
        let begun = self.parts.iter().enumerate().try_for_each(|(n, layers)| {
            let mut pages = Vec::new();
            for (hash, place) in blocks {
                let bytes = state
                    .on_host
                    .get(hash)
                    .ok_or_else(|| Error::Argument("the block is not on the host".into()))?
                    .parts[n]
                    .clone();
                pages.push((bytes, self.pages(layers.clone(), *place)?));
            }
            // No call of this waits: the copier's threads take the chunks in the order of the calls, and
            // complete them in any order.
            load.0.push(self.copier.upload_pages(pages)?);
            Ok(())
        });
        let load = Arc::new(load);
        for (hash, place) in blocks {
            let used = &mut state.places[*place];
            // Also after an error: what has begun writes to the place.
            used.load = Some(load.clone());
            if begun.is_ok() {
                used.hash = Some(*hash);
                state.on_device.insert(*hash, *place);
            }
        }
        begun
    }
}

impl State {
    /// Drops the host's oldest blocks, as many as one transfer stores, by one search. Whether there was one.
    fn forget(&mut self) -> bool {
        let mut oldest: Vec<_> = self.on_host.iter().map(|(hash, block)| (block.last, *hash)).collect();
        oldest.sort_unstable();
        oldest.iter().take(TOGETHER).for_each(|(_, hash)| drop(self.on_host.remove(hash)));
        !oldest.is_empty()
    }

    /// The load of a place, if it has ended, keeps the host's buffers no more. One that has failed has brought nothing.
    fn end_load(&mut self, place: Place) {
        let used = &mut self.places[place];
        let Some(come) = used.load.as_ref().and_then(|load| load.has_come()) else { return };
        used.load = None;
        used.hash.take_if(|_| !come).and_then(|hash| self.on_device.remove(&hash));
    }

    /// Places that were taken and are not needed.
    fn give(&mut self, places: &[Place]) {
        places.iter().for_each(|&place| self.places[place] = Used::default());
    }

    /// Blocks of a lease that there will not be.
    fn end(&mut self, blocks: &[Leased]) {
        blocks.iter().for_each(|block| self.places[block.place].leases -= 1);
    }
}

impl Lease<'_> {
    /// Whether the request is to compute this block, by its number in the call.
    pub fn is_new(&self, block: usize) -> bool {
        self.blocks[block].is_new
    }

    /// The keys, and the values, of a layer of a block. They are there after [`layer`](Self::layer).
    pub fn pages(&self, layer: usize, block: usize) -> Result<StridedSlice> {
        self.tier.pages(layer..layer + 1, self.blocks[block].place)
    }

    /// Waits until this layer of all blocks has been loaded. What is submitted to a stream afterwards finds it there.
    pub fn layer(&self, layer: usize, stream: &Stream) -> Result<()> {
        let part = self.tier.parts.iter().position(|layers| layers.contains(&layer));
        self.loads.iter().filter_map(|load| load.0.get(part?)).try_for_each(|part| part.order(stream))
    }

    /// All work of the request that uses the blocks is on `stream`. From now on others may use the new ones.
    pub fn release(self, stream: &Stream) -> Result<()> {
        let work = Arc::new(stream.hold(())?);
        let mut state = self.tier.state();
        for Leased { hash, place, is_new } in self.blocks {
            // Here, not when the next request waits for its blocks: to let go of many buffers takes as long as a copy.
            state.end_load(place);
            let is_known = state.on_device.contains_key(&hash);
            let used = &mut state.places[place];
            used.leases -= 1;
            used.work.retain(|work| !matches!(work.is_done(), Ok(true)));
            used.work.push(work.clone());
            // Where two requests have computed the same block, the first one's stays.
            if is_new && !is_known {
                used.hash = Some(hash);
                state.on_device.insert(hash, place);
            }
        }
        Ok(())
    }
}

/// The bytes that stand for keys and values here.
pub fn content(hash: Hash, layer: usize, plane: usize) -> u8 {
    (hash as usize * 131 + layer * 7 + plane * 3) as u8
}

/// A request: writes the blocks that it computes, and reads all of them: for each layer, each block and each plane a page.
pub fn request(tier: &Tier, stream: &Stream, hashes: &[Hash], read: &DeviceSlice) -> Result<bool> {
    let Some(lease) = tier.lease(hashes, stream)? else { return Ok(false) };
    let mut at = 0;
    for layer in 0..LAYERS {
        lease.layer(layer, stream)?;
        // Here a server launches the layer's kernels.
        for (block, hash) in hashes.iter().enumerate() {
            let pages = lease.pages(layer, block)?;
            for plane in 0..PLANES {
                let page = pages.get(plane)?;
                if lease.is_new(block) {
                    let mut computed = tier.copier.pool().checkout(tier.page)?;
                    computed.try_resize(tier.page, content(*hash, layer, plane))?;
                    drop(stream.upload(computed, &page)?);
                }
                drop(stream.copy(&page, read.slice(at..at + tier.page)?)?);
                at += tier.page;
            }
        }
    }
    lease.release(stream)?;
    Ok(true)
}

#[allow(dead_code, reason = "a test has this file as a module")]
fn main() -> Result<()> {
    const PAGE: usize = 16 << 10;
    let device = Device::open(&std::env::args().nth(1).unwrap_or_else(|| "auto".into()))?;
    let pool = |bytes| Pool::builder(&device).capacity(bytes).unpinned(pinpool::Unpinned::Allow).build();
    let (blocks, copier) = (pool(256 << 20)?, Copier::builder(&pool(32 << 20)?, &device).build()?);
    let (tier, stream) = (Tier::new(&blocks, copier, 64, PAGE, None)?, device.stream()?);
    let (read, since) = (device.alloc(16 * LAYERS * PLANES * PAGE)?, std::time::Instant::now());
    // Conversations that alternate: what one of them left is on the host when it comes back.
    for turn in 0..24_u64 {
        let hashes: Vec<Hash> = (0..16).map(|block| turn % 8 * 1000 + block).collect();
        while !request(&tier, &stream, &hashes, &read)? {
            stream.synchronize()?;
        }
    }
    stream.synchronize()?;
    let ((loaded, stored), time) = (tier.counts(), since.elapsed());
    println!("24 requests of 16 blocks in {time:.1?}: {loaded} blocks were loaded, {stored} stored");
    Ok(())
}

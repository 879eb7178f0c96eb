//! A host tier for a paged cache of keys and values: blocks that the device has no room for stay in pinned memory.
//!
//! A block has the keys and values of a few tokens: on the device one page in each of 64 planes (32 layers, keys and
//! values), in pinned memory one buffer for each layer. A hash of the tokens names it. Requests *lease* blocks:
//!
//! - Blocks that the device has are used where they are.
//! - Blocks that the host has are loaded, the first layer of all of them first. [`Lease::layer`] waits for one layer, so
//!   that the kernels of the first layers run while the last layers are still on the link.
//! - The others the request computes, and [`Lease::release`] makes them known.
//!
//! A block is evicted for another when it is unused for longest, no request has it, and the device is done with it: a
//! [hold](Stream::hold) of each stream that used it tells. Its bytes go to the host first, unless they are there.
//!
//! `cargo run --release --example kv_tier -- cuda:0` (without a name: the first device there is, or the host device).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pinpool::copier::Transfer;
use pinpool::{Copier, Device, DeviceBuffer, DeviceSlice, Error, InFlight, PinnedBuf, Pool, Result, Stream};

/// Layers of the model.
pub const LAYERS: usize = 32;
/// Planes of each layer: keys and values.
pub const PLANES: usize = 2;

/// What names a block: a hash of its tokens and of all before them.
pub type Hash = u64;
/// A block's place in each plane.
type Place = usize;

/// See above.
pub struct Tier {
    /// By layer, then keys and values. Each has a page for each place.
    planes: Vec<DeviceBuffer>,
    page: usize,
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
    loaded: u64,
    stored: u64,
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
    layers: Vec<Arc<PinnedBuf>>,
    last: u64,
}

struct Load {
    transfer: Transfer<Vec<Arc<PinnedBuf>>>,
    blocks: usize,
}

/// Blocks that a request uses. If it is dropped and not released, its blocks stay where they are for good: what the
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
        let is_loaded = self.load.as_ref().is_none_or(|load| load.transfer.is_over());
        self.leases == 0 && is_loaded && self.work.iter().all(|work| matches!(work.is_done(), Ok(true)))
    }

    /// Whether its load has failed: the block is not there.
    fn is_lost(&self) -> bool {
        let all = |load: &Load| load.blocks * LAYERS * PLANES;
        self.load
            .as_ref()
            .is_some_and(|load| load.transfer.is_over() && !load.transfer.wait_pieces(all(load)))
    }
}

impl Tier {
    /// Room for `blocks` blocks on the device, with pages of `page` bytes. The pool is for the host's blocks alone, with
    /// room for all that are leased at once. The copier has its own, since blocks do not go before copies need memory.
    pub fn new(pool: &Pool, copier: Copier, blocks: usize, page: usize, poison: Option<u8>) -> Result<Self> {
        let device = copier.device();
        let planes = (0..LAYERS * PLANES).map(|_| device.alloc(blocks * page)).collect::<Result<_>>()?;
        let places = (0..blocks).map(|_| Used::default()).collect();
        Ok(Self {
            planes,
            page,
            pool: pool.clone(),
            copier,
            poison,
            state: Mutex::new(State { places, ..State::default() }),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks loaded from the host, and stored there.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.state();
        (state.loaded, state.stored)
    }

    /// The pages of one layer of a block.
    fn pages(&self, layer: usize, place: Place) -> Result<Vec<DeviceSlice>> {
        let page = place * self.page..(place + 1) * self.page;
        self.planes[layer * PLANES..][..PLANES].iter().map(|plane| plane.slice(page.clone())).collect()
    }

    /// Leases these blocks for work on `stream`. `None`: too many places are in use now.
    pub fn lease(&self, hashes: &[Hash], stream: &Stream) -> Result<Option<Lease<'_>>> {
        let mut lease = Lease { tier: self, blocks: Vec::new(), loads: Vec::new() };
        let Some((mut free, evicted)) = self.take_places(hashes) else { return Ok(None) };
        let stored = self.store(&free, &evicted);
        let mut state = self.state();
        let now = state.now;
        let stored = stored.inspect_err(|_| state.give(&free))?;
        state.stored += stored.len() as u64;
        let host = stored.into_iter().map(|(hash, layers)| (hash, HostBlock { layers, last: now }));
        state.on_host.extend(host);
        let mut loading = Vec::new();
        for &hash in hashes {
            // Another request may have brought it meanwhile.
            let known = state.on_device.get(&hash).copied().or_else(|| lease.place(hash));
            let place = match known.or_else(|| free.pop()) {
                Some(place) => place,
                // It was there, and is gone: others took the place. The caller asks again.
                None => {
                    state.end(&lease.blocks);
                    return Ok(None);
                }
            };
            let on_host = match known {
                Some(_) => false,
                None => state.on_host.get_mut(&hash).map(|block| block.last = now).is_some(),
            };
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
            let load = self.load(&mut state, &loading);
            state.loaded += load.inspect_err(|_| state.end(&lease.blocks))?.blocks as u64;
        }
        // Behind the work of other streams that computed blocks, and with the loads of other requests.
        for Leased { place, .. } in &lease.blocks {
            let used = &state.places[*place];
            used.work.iter().try_for_each(|work| stream.wait_for_copy(work))?;
            if let Some(load) =
                used.load.as_ref().filter(|load| !lease.loads.iter().any(|l| Arc::ptr_eq(l, load)))
            {
                lease.loads.push(load.clone());
            }
        }
        drop(state);
        Ok(Some(lease))
    }

    /// A place for each block that the device lacks, and the blocks that were there. The places are leased.
    fn take_places(&self, hashes: &[Hash]) -> Option<(Vec<Place>, Vec<Option<Hash>>)> {
        let mut state = self.state();
        let State { places, on_device, now, .. } = &mut *state;
        *now += 1;
        for place in places.iter_mut().filter(|place| place.is_lost()) {
            place.hash.take().and_then(|hash| on_device.remove(&hash));
        }
        let mut missing: Vec<Hash> =
            hashes.iter().copied().filter(|hash| !on_device.contains_key(hash)).collect();
        missing.sort_unstable();
        missing.dedup();
        let is_wanted = |used: &Used| used.hash.is_some_and(|hash| hashes.contains(&hash));
        let mut idle: Vec<Place> =
            (0..places.len()).filter(|&n| !is_wanted(&places[n]) && places[n].is_idle()).collect();
        idle.sort_by_key(|&n| places[n].last);
        if idle.len() < missing.len() {
            return None;
        }
        idle.truncate(missing.len());
        let take = |&n: &Place| {
            let used = &mut places[n];
            let hash = used.hash.take();
            hash.and_then(|hash| on_device.remove(&hash));
            *used = Used { leases: 1, last: *now, ..Used::default() };
            hash
        };
        let evicted = idle.iter().map(take).collect();
        Some((idle, evicted))
    }

    /// Stores the blocks that were in these places, but for those that the host has.
    fn store(&self, places: &[Place], evicted: &[Option<Hash>]) -> Result<Vec<(Hash, Vec<Arc<PinnedBuf>>)>> {
        let blocks = places.iter().zip(evicted).filter_map(|(place, hash)| Some((*place, (*hash)?)));
        let blocks: Vec<(Place, Hash)> =
            blocks.filter(|(_, hash)| !self.state().on_host.contains_key(hash)).collect();
        let mut pages = Vec::new();
        for (place, _) in &blocks {
            for layer in 0..LAYERS {
                pages.push((self.pages(layer, *place)?, self.host_buffer()?));
            }
        }
        let mut layers = match pages.is_empty() {
            true => Vec::new(),
            false => self.copier.download_pages(pages)?.wait()?,
        }
        .into_iter()
        .map(Arc::new);
        let stored = blocks.iter().map(|(_, hash)| (*hash, layers.by_ref().take(LAYERS).collect())).collect();
        if let Some(byte) = self.poison {
            for plane in &self.planes {
                for place in places {
                    self.copier.upload_slice(&vec![byte; self.page], plane.slice(place * self.page..)?)?;
                }
            }
        }
        Ok(stored)
    }

    /// A buffer for one layer of a block. Where the pool is full, blocks of the host make room.
    fn host_buffer(&self) -> Result<PinnedBuf> {
        loop {
            match self.pool.try_checkout(PLANES * self.page) {
                Err(Error::Exhausted { .. }) => {}
                said => return said,
            }
            let mut state = self.state();
            let oldest = state.on_host.iter().min_by_key(|(_, block)| block.last).map(|(hash, _)| *hash);
            let gone = oldest.and_then(|hash| state.on_host.remove(&hash));
            drop(state);
            if gone.is_none() {
                // Loads have the rest.
                return self.pool.checkout(PLANES * self.page);
            }
        }
    }

    /// Begins to load these blocks, layer by layer.
    fn load(&self, state: &mut State, blocks: &[(Hash, Place)]) -> Result<Arc<Load>> {
        let mut pages = Vec::new();
        for layer in 0..LAYERS {
            for (hash, place) in blocks {
                let bytes = state.on_host.get(hash).ok_or(Error::Empty)?.layers[layer].clone();
                pages.push((bytes, self.pages(layer, *place)?));
            }
        }
        // No call of this waits: the copier's threads do the work.
        let transfer = self.copier.upload_pages(pages)?;
        let load = Arc::new(Load { transfer, blocks: blocks.len() });
        for (hash, place) in blocks {
            let used = &mut state.places[*place];
            (used.hash, used.load) = (Some(*hash), Some(load.clone()));
            state.on_device.insert(*hash, *place);
        }
        Ok(load)
    }
}

impl State {
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
    fn place(&self, hash: Hash) -> Option<Place> {
        self.blocks.iter().find(|block| block.hash == hash).map(|block| block.place)
    }

    /// Whether the request is to compute this block, by its number in the call.
    pub fn is_new(&self, block: usize) -> bool {
        self.blocks[block].is_new
    }

    /// The keys, and the values, of a layer of a block. They are there after [`layer`](Self::layer).
    pub fn pages(&self, layer: usize, block: usize) -> Result<Vec<DeviceSlice>> {
        self.tier.pages(layer, self.blocks[block].place)
    }

    /// Waits until this layer of all blocks has been loaded. What is submitted to a stream afterwards finds it there.
    pub fn layer(&self, layer: usize, stream: &Stream) -> Result<()> {
        for Load { transfer, blocks } in self.loads.iter().map(|load| &**load) {
            if !transfer.wait_pieces((layer + 1) * blocks * PLANES) {
                // It has failed, and says why.
                transfer.order(stream)?;
            }
        }
        Ok(())
    }

    /// All work of the request that uses the blocks is on `stream`. From now on others may use the new ones.
    pub fn release(self, stream: &Stream) -> Result<()> {
        let work = Arc::new(stream.hold(())?);
        let mut state = self.tier.state();
        for Leased { hash, place, is_new } in self.blocks {
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
pub fn request(tier: &Tier, stream: &Stream, hashes: &[Hash], read: &DeviceBuffer) -> Result<bool> {
    let Some(lease) = tier.lease(hashes, stream)? else { return Ok(false) };
    let mut at = 0;
    for layer in 0..LAYERS {
        lease.layer(layer, stream)?;
        // Here a server launches the layer's kernels.
        for (block, hash) in hashes.iter().enumerate() {
            for (plane, page) in lease.pages(layer, block)?.into_iter().enumerate() {
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
    let read = device.alloc(16 * LAYERS * PLANES * PAGE)?;
    let since = std::time::Instant::now();
    // Conversations that come by turns: what one of them left is on the host when it comes back.
    for turn in 0..24_u64 {
        let hashes: Vec<Hash> = (0..16).map(|block| turn % 8 * 1000 + block).collect();
        while !request(&tier, &stream, &hashes, &read)? {
            stream.synchronize()?;
        }
    }
    stream.synchronize()?;
    let ((loaded, stored), time) = (tier.counts(), since.elapsed());
    println!(
        "24 requests of 16 blocks in {time:.1?}: {loaded} blocks loaded from the host, {stored} stored there"
    );
    Ok(())
}

//! What tests ask of a world that they move by hand (the command `by-hand`), many times a run.

use super::Gpus;
use super::world::{Place, World, world};
use crate::common::Fault;

impl World {
    /// A device's streams that were not destroyed, in the order in which they were made.
    fn streams_of(&self, device: usize) -> Vec<usize> {
        let of = |context: &usize| self.contexts.get(context).is_some_and(|c| c.device == device);
        let streams = self.streams.iter().filter(|(_, stream)| !stream.destroyed && of(&stream.context));
        streams.map(|(handle, _)| *handle).collect()
    }
}

/// A device's streams are counted in the order in which they were made, without those that were destroyed.
impl Gpus {
    /// Runs one operation that can run, of any stream. `false`: there is none.
    pub fn step(self) -> bool {
        let mut world = world(self.number);
        let runnable = world.runnable(None);
        world.step(&runnable)
    }

    /// Runs the next operation of a device's nth stream. `false`: it has none, or none that can run.
    pub fn step_stream(self, device: usize, nth: usize) -> bool {
        let mut world = world(self.number);
        let Some(stream) = world.streams_of(device).get(nth).copied() else { return false };
        let mut runnable = world.runnable(Some(device));
        runnable.retain(|handle| *handle == stream);
        world.step(&runnable)
    }

    /// Which of a device's streams could run an operation now.
    pub fn runnable(self, device: usize) -> Vec<usize> {
        let world = world(self.number);
        let (streams, runnable) = (world.streams_of(device), world.runnable(Some(device)));
        (0..streams.len()).filter(|nth| runnable.contains(&streams[*nth])).collect()
    }

    /// How many operations of a device are queued.
    pub fn queued(self, device: usize) -> usize {
        let world = world(self.number);
        world.streams_of(device).iter().map(|handle| world.streams[handle].queue.len()).sum()
    }

    /// Holds what a device's nth stream has queued, and what follows: it runs only for a call that synchronises.
    /// `false`: there is no such stream.
    pub fn hold(self, device: usize, nth: usize) -> bool {
        let mut world = world(self.number);
        let stream = world.streams_of(device).get(nth).copied();
        let stream = stream.and_then(|handle| world.streams.get_mut(&handle));
        stream.map(|stream| stream.held = Some(stream.done)).is_some()
    }

    /// Nothing of a device's nth stream is held any more, or of all its streams.
    pub fn resume(self, device: usize, nth: Option<usize>) {
        let mut world = world(self.number);
        for (at, handle) in world.streams_of(device).into_iter().enumerate() {
            if let Some(stream) = world.streams.get_mut(&handle).filter(|_| nth.is_none_or(|nth| nth == at)) {
                stream.held = None;
            }
        }
    }

    /// How many bytes of host memory are registered.
    pub fn registered(self) -> usize {
        world(self.number).registered.values().sum()
    }

    /// Makes a call fail.
    pub fn fail(self, fault: Fault) {
        world(self.number).faults.push(fault);
    }

    /// Whether a call is still to fail.
    pub fn is_armed(self) -> bool {
        world(self.number).faults.iter().any(|fault| fault.left > 0)
    }

    /// No call is to fail any more. Returns the faults that have not struck.
    pub fn calm(self) -> Vec<Fault> {
        let mut faults = std::mem::take(&mut world(self.number).faults);
        faults.retain(|fault| fault.left > 0);
        faults
    }

    /// Whether a device's primary context is of no use any more.
    pub fn is_lost(self, device: usize) -> bool {
        let world = world(self.number);
        let context = world.devices[device].primary.and_then(|(context, _)| world.contexts.get(&context));
        context.is_some_and(|context| context.dead.is_some())
    }

    /// What device memory holds now. No stream moves.
    pub fn read(self, address: u64, len: usize) -> Vec<u8> {
        world(self.number).bytes(Place::Device(address), len)
    }
}

//! Copies to and from the devices, claims on a stream, and handles dropped meanwhile.

use super::*;

const UPLOAD: &str = "cuMemcpyHtoDAsync_v2";
const DOWNLOAD: &str = "cuMemcpyDtoHAsync_v2";

impl World<'_> {
    pub(super) fn take_buf(&mut self, at: usize) -> Option<Held<PinnedBuf>> {
        (!self.bufs.is_empty()).then(|| self.bufs.swap_remove(at % self.bufs.len()))
    }

    pub(super) fn lane(&self, at: usize) -> usize {
        at % self.lanes.len()
    }

    /// Blank device memory.
    pub(super) fn memory(&mut self, device: usize, len: usize) -> Option<DeviceSlice> {
        let alloc = || self.devices[device].alloc(len).ok();
        if self.dead[device] { None } else { self.machine.calmly(alloc) }
    }

    /// An error of a submit.
    fn submit_error(&self, error: &Error) {
        assert!(self.tolerant(), "no fault, and yet: {error}");
        assert!(matches!(error, Error::Device(_)), "unexpected: {error}");
    }

    /// Whether a submit is queued: one that failed may be all the same.
    fn is_queued<T, E>(&self, result: &Result<T, E>, call: &str) -> bool {
        let anyway = self.armed == Some((call, Failure::RunsAnyway)) && !self.machine.is_armed();
        result.is_ok() || anyway
    }

    /// A copy was queued that uses this host memory.
    fn queued(&mut self, lane: usize, host: Range, seen: Seen, brings: Vec<u8>) -> u64 {
        let id = self.id();
        self.copies.push(Copy { id, lane, host, seen, brings, dead: false });
        id
    }

    /// The same of an upload.
    fn sent(&mut self, lane: usize, host: Range, memory: DeviceSlice, bytes: Vec<u8>) -> u64 {
        let seen = Seen::Device(memory.slice(..).unwrap());
        let copy = self.queued(lane, host, seen, bytes.clone());
        if self.regions.len() >= REGIONS {
            self.regions.remove(0);
        }
        self.regions.push(Region { memory, lane, copy, bytes });
        copy
    }

    /// What came of the submit of a buffer with these bytes.
    fn submitted(
        &mut self,
        result: Result<InFlight<PinnedBuf>, SubmitError<PinnedBuf>>,
        bytes: Vec<u8>,
        trip: Trip,
        keep: bool,
    ) {
        match result {
            Ok(handle) => self.keep(Flight { handle, trip, flag: None }, keep),
            Err(SubmitError { error, buffer: Some(buf) }) => {
                assert!(trip.after.is_empty(), "queued, and yet the buffer came back");
                self.submit_error(&error);
                self.tally.note("submit refused, buffer back");
                self.bufs.push(Held { buf, bytes });
            }
            Err(SubmitError { error, buffer: None }) => {
                self.submit_error(&error);
                if !trip.after.is_empty() {
                    self.tally.note("submit that failed but runs");
                }
                // Its device may have died by it.
                if self.devices[self.lanes[trip.lane].device].lost().is_some() {
                    self.graves.extend(trip.range);
                }
            }
        }
    }

    pub(super) fn upload(&mut self, at: usize, lane: usize, keep: bool) {
        let lane = self.lane(lane);
        let Some(Held { buf, bytes }) = self.take_buf(at) else { return };
        let Some(memory) = self.memory(self.lanes[lane].device, bytes.len()) else {
            return self.bufs.push(Held { buf, bytes });
        };
        let stream = self.lanes[lane].stream.clone();
        let (host, mut trip) = (range(&buf), Trip::of(&buf, lane, bytes.clone()));
        let result = stream.upload(buf, &memory);
        if self.is_queued(&result, UPLOAD) {
            trip.after.push(self.sent(lane, host, memory, bytes.clone()));
        }
        self.submitted(result, bytes, trip, keep);
    }

    pub(super) fn download(&mut self, at: usize, lane: usize, region: usize, keep: bool) {
        let lane = self.lane(lane);
        let Some((slice, brings)) = self.source(lane, region) else { return };
        let mut fit = (0..self.bufs.len()).map(|i| (i + at) % self.bufs.len());
        let Some(at) = fit.find(|&i| self.bufs[i].buf.capacity() >= slice.len()) else { return };
        let Held { mut buf, mut bytes } = self.bufs.swap_remove(at);
        while buf.len() < slice.len() || buf[..slice.len()] == *brings {
            // So that the bytes before the copy are known, and differ from those that the copy brings.
            bytes = pattern(self.id(), slice.len());
            buf.clear();
            buf.extend_from_slice(&bytes);
        }
        let (host, mut trip) = (range(&buf), Trip::of(&buf, lane, brings.clone()));
        let before = bytes[..slice.len()].to_vec();
        let result = self.lanes[lane].stream.download(slice, buf);
        if self.is_queued(&result, DOWNLOAD) {
            trip.after.push(self.queued(lane, host, Seen::Host(host.0, before), brings));
        }
        self.submitted(result, bytes, trip, keep);
    }

    /// Device memory that holds these bytes when a copy on that lane reads it.
    fn source(&mut self, lane: usize, region: usize) -> Option<(DeviceSlice, Vec<u8>)> {
        let device = self.lanes[lane].device;
        if !self.dead[device] {
            self.sweep();
        }
        let mut there: Vec<_> = self.regions.iter().collect();
        there.retain(|region| {
            let ordered = region.lane == lane || self.have_run(&[region.copy]);
            ordered && self.lanes[region.lane].device == device
        });
        let region = there.get(region % there.len().max(1))?;
        Some((region.memory.slice(..).unwrap(), region.bytes.clone()))
    }

    /// On two streams, without handles: its copies stand for it.
    pub(super) fn share(&mut self, at: usize, lane: usize, other: usize) {
        let Some(Held { buf, bytes }) = self.take_buf(at) else { return };
        let buf = Arc::new(buf);
        for lane in [self.lane(lane), self.lane(other)] {
            let Some(memory) = self.memory(self.lanes[lane].device, bytes.len()) else { continue };
            let result = self.lanes[lane].stream.upload(buf.clone(), &memory);
            if self.is_queued(&result, UPLOAD) {
                self.sent(lane, range(&buf), memory, bytes.clone());
            }
            if let Err(SubmitError { error, .. }) = result {
                self.submit_error(&error);
            }
        }
        self.shared.push(Held { buf, bytes });
    }

    pub(super) fn drop_shared(&mut self, at: usize) {
        if !self.shared.is_empty() {
            self.shared.swap_remove(at % self.shared.len());
        }
    }

    pub(super) fn hold(&mut self, at: usize, lane: usize, keep: bool) {
        let lane = self.lane(lane);
        let Some(Held { buf, bytes }) = self.take_buf(at) else { return };
        self.sweep();
        let mut trip = Trip::of(&buf, lane, bytes.clone());
        let result = self.lanes[lane].stream.hold(buf);
        match &result {
            Ok(_) => trip.after = self.outstanding(lane),
            Err(SubmitError { buffer: Some(_), .. }) => {}
            Err(SubmitError { buffer: None, .. }) => {
                self.graves.extend(trip.range);
                self.may_lose = true;
            }
        }
        self.submitted(result, bytes, trip, keep);
    }

    pub(super) fn claim(&mut self, lane: usize, size: Size, usage: Use) {
        let lane = self.lane(lane);
        let buf = match self.pool().try_checkout_on(&self.lanes[lane].stream, Self::request(size)) {
            Ok(buf) => buf,
            Err(error) => return self.refused(&[size], &error),
        };
        assert_eq!(buf.capacity(), size.len);
        match usage {
            Use::Drop => self.unclaim(buf),
            Use::Wait => {
                let claimed = buf.was_claimed();
                match buf.wait() {
                    Ok(buf) => {
                        if claimed {
                            self.tally.note("claim waited for");
                        }
                        self.admit(buf, size);
                    }
                    // It returned to where it was.
                    Err(Error::Timeout(_)) => {}
                    Err(error) => self.submit_error(&error),
                }
            }
            Use::OtherStream => {
                let other = (lane + 1) % self.lanes.len();
                let Some(memory) = self.memory(self.lanes[other].device, 1) else { return self.unclaim(buf) };
                match self.lanes[other].stream.download(&memory, buf) {
                    Err(SubmitError {
                        error: Error::Mismatch { what: "a stream-ready buffer", .. },
                        buffer: Some(buf),
                    }) => self.unclaim(buf),
                    wrong => panic!("used on another stream: {wrong:?}"),
                }
            }
            Use::Land(keep) => self.land(lane, buf, keep),
        }
    }

    pub(super) fn crowd(&mut self, lane: usize, size: Size, usages: &[Use]) {
        let mut sent = 0;
        self.take_all(size, |world, at| {
            world.upload(at, lane + sent % 3 / 2, false);
            sent += 1;
        });
        for usage in usages {
            self.check();
            self.claim(lane, size, *usage);
        }
    }

    fn unclaim(&mut self, buf: StreamBuf) {
        if buf.was_claimed() {
            self.tally.note("claim dropped unused");
        }
    }

    /// Downloads into a stream-ready buffer.
    fn land(&mut self, lane: usize, buf: StreamBuf, keep: bool) {
        let source = self.source(lane, usize::from(buf.was_claimed()));
        let Some((slice, bytes)) = source.filter(|s| s.0.len() <= buf.capacity()) else {
            return self.unclaim(buf);
        };
        let (capacity, claimed) = (buf.capacity(), buf.was_claimed());
        match self.lanes[lane].stream.download(slice, buf) {
            Ok(handle) => {
                if claimed {
                    self.tally.note("claim used");
                    // Which segment it was is not known, so one of the downloads to segments whose handles were dropped
                    // on this stream may be overwritten before the model has seen it.
                    let kept: Vec<Range> = self.flights.iter().filter_map(|f| f.trip.range).collect();
                    self.copies.retain(|c| {
                        let given_up = !kept.iter().any(|range| overlap(*range, c.host));
                        c.lane != lane || c.dead || matches!(c.seen, Seen::Device(_)) || !given_up
                    });
                }
                let trip = Trip { lane, range: None, capacity, bytes, after: self.outstanding(lane) };
                self.keep(Flight { handle, trip, flag: None }, keep);
            }
            Err(SubmitError { error, buffer }) => {
                self.submit_error(&error);
                if let Some(buf) = buffer {
                    self.unclaim(buf);
                }
            }
        }
    }
}

//! Copies to and from the devices, claims on a stream, and handles dropped meanwhile.

use super::*;

impl World<'_> {
    pub(super) fn take_buf(&mut self, at: usize) -> Option<Live> {
        (!self.bufs.is_empty()).then(|| self.bufs.swap_remove(at % self.bufs.len()))
    }

    /// A buffer whose bytes can be told from blank memory, which a download may have brought.
    pub(super) fn take_sendable(&mut self, at: usize) -> Option<Live> {
        let mut live = self.take_buf(at)?;
        if live.bytes.contains(&BLANK) {
            let id = self.id();
            live.bytes = pattern(id, live.bytes.len());
            live.buf.copy_from_slice(&live.bytes);
        }
        Some(live)
    }

    pub(super) fn lane(&self, at: usize) -> usize {
        at % self.lanes.len()
    }

    /// Blank device memory.
    pub(super) fn memory(&mut self, device: usize, len: usize) -> Option<DeviceSlice> {
        if self.dead[device] {
            return None;
        }
        let (handle, probe) = (self.devices[device].clone(), self.probes[device].clone());
        self.calmly(|world| {
            let memory = handle.alloc(len).ok();
            let blank = memory.as_ref().map(|m| probe.upload_blocking(&vec![BLANK; len], m));
            if let Some(Err(error)) = blank {
                // Only a device that died by a fault in this very call does that.
                assert!(error.is_device_lost() && world.tolerant(), "{error}");
                return None;
            }
            memory
        })
    }

    pub(super) fn keep_region(&mut self, region: Region) {
        if self.regions.len() >= REGIONS {
            self.regions.remove(0);
        }
        self.regions.push(region);
    }

    /// An error of a submit.
    pub(super) fn submit_error(&mut self, error: &Error) {
        assert!(self.tolerant(), "no fault, and yet: {error}");
        assert!(matches!(error, Error::Device(_)), "unexpected: {error}");
    }

    /// Whether a submit that failed is queued all the same.
    pub(super) fn runs_anyway(&mut self, device: usize) -> bool {
        let armed = self.armed;
        armed.is_some_and(|f| {
            f.call == Call::Copy && f.failure == Failure::RunsAnyway && f.device == device as u32
        }) && self.struck()
    }

    pub(super) fn upload(
        &mut self,
        at: usize,
        lane: usize,
        part: Option<(u8, u8)>,
        keep: Keep,
        orphan: bool,
    ) {
        let lane = self.lane(lane);
        let device = self.lanes[lane].device;
        let Some(Live { buf, bytes }) = self.take_sendable(at) else { return };
        let (start, end) = match part {
            None => (0, bytes.len()),
            Some((a, b)) => {
                let start = bytes.len() * usize::from(a.min(b)) / 256;
                let end = bytes.len() * (usize::from(a.max(b)) + 1) / 256;
                (start, end.max(start + 1).min(bytes.len()))
            }
        };
        if start >= end {
            return self.bufs.push(Live { buf, bytes });
        }
        let Some(memory) = self.memory(device, end - start) else {
            let buf = self.upload_to_ruins(buf, lane);
            return self.bufs.push(Live { buf, bytes });
        };
        let range = (buf.as_ptr() as usize, span(buf.capacity()));
        let (capacity, id) = (buf.capacity(), self.id());
        let sent = bytes[start..end].to_vec();
        let stream = self.lanes[lane].stream.clone();
        let result = match part {
            None => stream.upload(buf, &memory),
            Some(_) => stream.upload_part(buf, start..end, memory.slice(..)),
        };
        let queued = result.is_ok() || self.runs_anyway(device);
        if queued {
            self.tally.note(if part.is_some() { "upload of a part" } else { "upload" });
            if orphan {
                self.tally.note("device memory dropped under a copy");
            } else {
                let slice = memory.slice(..).unwrap();
                self.copies.push(Copy {
                    id,
                    device,
                    lane,
                    host: range,
                    seen: Seen::Device(slice),
                    allowed: vec![sent.clone()],
                    dead: false,
                });
                self.keep_region(Region { memory, device, lane, copy: id, bytes: sent });
            }
        }
        match result {
            Ok(flight) => {
                let flight = Flight {
                    handle: Handle::Own(flight),
                    range: Some(range),
                    capacity,
                    expect: Expect::Same(bytes),
                    after: if orphan { Vec::new() } else { vec![id] },
                    flag: None,
                };
                self.keep(flight, keep, &[lane]);
            }
            Err(SubmitError { error, buffer: Some(buf) }) => {
                assert!(!queued, "queued, and yet the buffer came back");
                self.submit_error(&error);
                self.tally.note("upload refused, buffer back");
                self.bufs.push(Live { buf, bytes });
            }
            Err(SubmitError { error, buffer: None }) => {
                self.submit_error(&error);
                if queued {
                    self.tally.note("upload that failed but runs");
                }
                self.detached.push(capacity);
                self.bury_if_dead(device, range);
            }
        }
    }

    /// A dead device refuses the copy, and the buffer comes back as it was.
    pub(super) fn upload_to_ruins(&mut self, buf: PinnedBuf, lane: usize) -> PinnedBuf {
        let device = self.lanes[lane].device;
        let Some(memory) = self.ruins[device].as_ref().filter(|m| m.len() >= buf.len()) else { return buf };
        if self.devices[device].lost().is_none() {
            return buf; // No call has found the device dead yet.
        }
        match self.lanes[lane].stream.upload(buf, memory) {
            Err(SubmitError { error, buffer: Some(buf) }) => {
                assert!(error.is_device_lost(), "{error}");
                self.tally.note("upload refused, buffer back");
                buf
            }
            other => panic!("the device is dead, and yet: {other:?}"),
        }
    }

    /// A copy that was submitted to a device that died by it.
    pub(super) fn bury_if_dead(&mut self, device: usize, range: Range) {
        if self.devices[device].lost().is_some() {
            self.graves.push(range);
        }
    }

    pub(super) fn keep(&mut self, flight: Flight, keep: Keep, lanes: &[usize]) {
        match keep {
            Keep::Keep => self.flights.push(flight),
            Keep::Drop => self.let_go(flight, lanes),
            Keep::Forget => {
                let Flight { handle, range, capacity, .. } = flight;
                // A claimed segment's address is not known.
                if let Some(range) = range {
                    self.forgotten.push((range, capacity));
                } else {
                    self.forgotten.push(((0, 0), capacity));
                }
                self.tally.note("in flight: forgotten");
                std::mem::forget(handle);
            }
        }
    }

    pub(super) fn let_go(&mut self, flight: Flight, lanes: &[usize]) {
        self.tally.note("in flight: dropped");
        if !matches!(flight.handle, Handle::Nothing(_)) {
            self.detached.push(flight.capacity);
        }
        // A shared buffer has other handles too; its copies stand for it.
        if let (Handle::Own(_), Some(range)) = (&flight.handle, flight.range) {
            self.holds.push(Hold { range, after: flight.after.clone(), lanes: lanes.to_vec() });
        }
        drop(flight);
    }

    pub(super) fn download(&mut self, at: usize, lane: usize, region: usize, keep: Keep) {
        let lane = self.lane(lane);
        let device = self.lanes[lane].device;
        let Some((slice, allowed)) = self.source(device, lane, region) else { return };
        let Some(fits) = self.bufs.iter().position(|b| b.buf.capacity() >= slice.len()) else { return };
        let fit = (0..self.bufs.len()).map(|i| (i + at) % self.bufs.len());
        let at = { fit }.find(|&i| self.bufs[i].buf.capacity() >= slice.len()).unwrap_or(fits);
        let Live { mut buf, mut bytes } = self.bufs.swap_remove(at);
        while buf.len() < slice.len() || allowed.contains(&buf[..slice.len()].to_vec()) {
            // So that the bytes before the copy are known, and differ from those that the copy brings.
            let id = self.id();
            bytes = pattern(id, slice.len());
            buf.clear();
            buf.extend_from_slice(&bytes);
        }
        let range = (buf.as_ptr() as usize, span(buf.capacity()));
        let (capacity, id) = (buf.capacity(), self.id());
        let before = bytes[..slice.len()].to_vec();
        let result = self.lanes[lane].stream.clone().download(slice, buf);
        let queued = result.is_ok() || self.runs_anyway(device);
        if queued {
            self.tally.note("download");
            let seen = Seen::Host(range.0, before);
            let allowed = allowed.clone();
            self.copies.push(Copy { id, device, lane, host: range, seen, allowed, dead: false });
        }
        match result {
            Ok(flight) => {
                let flight = Flight {
                    handle: Handle::Own(flight),
                    range: Some(range),
                    capacity,
                    expect: Expect::OneOf(allowed),
                    after: vec![id],
                    flag: None,
                };
                self.keep(flight, keep, &[lane]);
            }
            Err(SubmitError { error, buffer: Some(buf) }) => {
                assert!(!queued, "queued, and yet the buffer came back");
                self.submit_error(&error);
                self.bufs.push(Live { buf, bytes });
            }
            Err(SubmitError { error, buffer: None }) => {
                self.submit_error(&error);
                self.detached.push(capacity);
                self.bury_if_dead(device, range);
            }
        }
    }

    /// Device memory to download from, and what it may hold when a copy on that lane reads it.
    pub(super) fn source(
        &mut self,
        device: usize,
        lane: usize,
        region: usize,
    ) -> Option<(DeviceSlice, Vec<Vec<u8>>)> {
        self.sweep_if_alive(device);
        let there: Vec<usize> =
            (0..self.regions.len()).filter(|&r| self.regions[r].device == device).collect();
        let region = &self.regions[*there.get(region % there.len().max(1))?];
        let ordered = region.lane == lane || !self.copies.iter().any(|c| c.id == region.copy);
        let mut allowed = vec![region.bytes.clone()];
        if !ordered {
            allowed.push(vec![BLANK; region.bytes.len()]);
        }
        Some((region.memory.slice(..).unwrap(), allowed))
    }

    pub(super) fn sweep_if_alive(&mut self, device: usize) {
        if !self.dead[device] {
            self.sweep();
        }
    }

    pub(super) fn share(&mut self, at: usize, lane: usize, other: usize, keep: Keep) {
        let Some(Live { buf, bytes }) = self.take_sendable(at) else { return };
        if bytes.is_empty() {
            return self.bufs.push(Live { buf, bytes });
        }
        let range = (buf.as_ptr() as usize, span(buf.capacity()));
        let capacity = buf.capacity();
        let buf = Arc::new(buf);
        for lane in [self.lane(lane), self.lane(other)] {
            let device = self.lanes[lane].device;
            let Some(memory) = self.memory(device, bytes.len()) else { continue };
            let id = self.id();
            let result = self.lanes[lane].stream.clone().upload(buf.clone(), &memory);
            if result.is_ok() || self.runs_anyway(device) {
                self.tally.note("upload shared by two streams");
                let seen = Seen::Device(memory.slice(..).unwrap());
                let allowed = vec![bytes.clone()];
                self.copies.push(Copy { id, device, lane, host: range, seen, allowed, dead: false });
                self.keep_region(Region { memory, device, lane, copy: id, bytes: bytes.clone() });
            }
            match result {
                Ok(flight) => {
                    let flight = Flight {
                        handle: Handle::Shared(flight),
                        range: Some(range),
                        capacity,
                        expect: Expect::Same(bytes.clone()),
                        after: vec![id],
                        flag: None,
                    };
                    // Forgetting it would keep a count for ever, and the model with it.
                    let keep = if keep == Keep::Forget { Keep::Drop } else { keep };
                    self.keep(flight, keep, &[lane]);
                }
                Err(SubmitError { error, .. }) => self.submit_error(&error),
            }
        }
        self.shared.push(Shared { buf, bytes });
    }

    pub(super) fn drop_shared(&mut self, at: usize) {
        if self.shared.is_empty() {
            return;
        }
        let shared = self.shared.swap_remove(at % self.shared.len());
        self.detached.push(shared.buf.capacity());
    }

    pub(super) fn hold(&mut self, at: usize, lane: usize, keep: Keep) {
        let lane = self.lane(lane);
        let Some(Live { buf, bytes }) = self.take_buf(at) else { return };
        self.sweep();
        let range = (buf.as_ptr() as usize, span(buf.capacity()));
        let capacity = buf.capacity();
        let after = self.outstanding(lane);
        match self.lanes[lane].stream.hold(buf) {
            Ok(flight) => {
                self.tally.note("hold");
                let handle = Handle::Own(flight);
                let expect = Expect::Same(bytes);
                let flight = Flight { handle, range: Some(range), capacity, expect, after, flag: None };
                self.keep(flight, keep, &[lane]);
            }
            Err(SubmitError { error, buffer: Some(buf) }) => {
                self.submit_error(&error);
                self.bufs.push(Live { buf, bytes });
            }
            Err(SubmitError { error, buffer: None }) => {
                self.submit_error(&error);
                self.graves.push(range);
                self.may_lose = true;
            }
        }
    }

    pub(super) fn claim(&mut self, lane: usize, size: Size, usage: Use) {
        let lane = self.lane(lane);
        let stream = self.lanes[lane].stream.clone();
        let buf = match self.pool().try_checkout_on(&stream, Self::request(size)) {
            Ok(buf) => buf,
            Err(error) => return self.refused(&[size], &error),
        };
        assert_eq!(buf.capacity(), size.len);
        self.tally.note(if buf.was_claimed() { "claim" } else { "stream-ready but free" });
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
                    Err(Error::Timeout(_)) => self.detached.push(size.len),
                    Err(error) => {
                        self.submit_error(&error);
                        self.detached.push(size.len);
                    }
                }
            }
            Use::OtherStream => {
                let other = (lane + 1) % self.lanes.len();
                let device = self.lanes[other].device;
                let Some(memory) = self.memory(device, 1) else { return self.unclaim(buf) };
                match self.lanes[other].stream.clone().download(&memory, buf) {
                    Err(SubmitError {
                        error: Error::Mismatch { what: "a stream-ready buffer", .. },
                        buffer: Some(buf),
                    }) => {
                        self.tally.note("refused: wrong stream");
                        self.unclaim(buf);
                    }
                    wrong => panic!("used on another stream: {wrong:?}"),
                }
            }
            Use::Land(keep) => self.land(lane, buf, keep),
        }
    }

    pub(super) fn crowd(&mut self, lane: usize, size: Size, usages: &[Use]) {
        for at in 0..64 {
            let before = self.bufs.len();
            self.checkout(size, Patience::Try, Who::Main);
            if self.bufs.len() == before {
                break;
            }
            self.upload(before, lane + at % 3 / 2, None, Keep::Drop, at % 5 == 4);
        }
        for usage in usages {
            self.check();
            self.claim(lane, size, *usage);
        }
    }

    pub(super) fn unclaim(&mut self, buf: StreamBuf) {
        if buf.was_claimed() {
            self.tally.note("claim dropped unused");
            self.detached.push(buf.capacity());
        }
        drop(buf);
    }

    /// Downloads into a stream-ready buffer.
    pub(super) fn land(&mut self, lane: usize, buf: StreamBuf, keep: Keep) {
        let device = self.lanes[lane].device;
        let source = self.source(device, lane, usize::from(buf.was_claimed()));
        let Some((slice, allowed)) = source.filter(|s| s.0.len() <= buf.capacity()) else {
            return self.unclaim(buf);
        };
        let (capacity, claimed) = (buf.capacity(), buf.was_claimed());
        match self.lanes[lane].stream.clone().download(slice, buf) {
            Ok(flight) => {
                if claimed {
                    self.tally.note("claim used");
                    // Which segment it was is not known, so one of the downloads to segments whose handles were dropped
                    // on this stream may be overwritten before the model has seen it.
                    let kept: Vec<Range> = self.flights.iter().filter_map(|f| f.range).collect();
                    self.copies.retain(|c| {
                        let given_up = !kept.iter().any(|range| overlap(*range, c.host));
                        c.lane != lane || c.dead || matches!(c.seen, Seen::Device(_)) || !given_up
                    });
                }
                let handle = Handle::Own(flight);
                let expect = Expect::OneOf(allowed);
                let after = self.outstanding(lane);
                let flight = Flight { handle, range: None, capacity, expect, after, flag: None };
                self.keep(flight, keep, &[lane]);
            }
            Err(SubmitError { error, buffer }) => {
                self.submit_error(&error);
                match buffer {
                    Some(buf) => self.unclaim(buf),
                    None => self.detached.push(capacity),
                }
            }
        }
    }

    pub(super) fn on_device(&mut self, lane: usize, region: usize) {
        let lane = self.lane(lane);
        let device = self.lanes[lane].device;
        let Some((slice, _)) = self.source(device, lane, region) else { return };
        let Some(memory) = self.memory(device, slice.len()) else { return };
        match self.lanes[lane].stream.clone().copy(slice, memory) {
            Ok(flight) => {
                self.tally.note("copy within the device");
                let after = self.outstanding(lane);
                let (handle, expect) = (Handle::Nothing(flight), Expect::Same(Vec::new()));
                self.flights.push(Flight { handle, range: None, capacity: 0, expect, after, flag: None });
            }
            Err(error) => self.submit_error(&error),
        }
    }
}

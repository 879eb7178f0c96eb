//! What tests ask of this driver beside its own calls, and what its report says.

use std::fmt::Write;
use std::time::Duration;

use super::world::World;

impl World {
    /// Answers a command that no other vendor has.
    pub fn own(&mut self, text: &str, words: &[&str], number: &dyn Fn(&str) -> usize) -> String {
        match *words {
            // The driver is not initialised.
            ["bare"] => self.ready = false,
            ["node", device, node] => {
                self.devices[number(device)].numa_node = node.parse().unwrap_or(-1);
            }
            // Another version of the driver, as `cuDriverGetVersion` counts.
            ["version", version] => self.version = number(version) as i32,
            // The next registration takes that many milliseconds beside its pages.
            ["first-pin", milliseconds] => {
                self.first_pin = Duration::from_millis(number(milliseconds) as u64)
            }
            // Kills the primary context of a device with that code.
            ["kill", device, code] => {
                if let Some((context, _)) = self.devices.get(number(device)).and_then(|d| d.primary) {
                    self.kill(context, number(code) as u32);
                }
            }
            // Gives the devices another value of an attribute.
            ["attribute", attribute, value] => {
                self.hosts.set_attribute(number(attribute) as i32, value.parse().unwrap_or(0));
            }
            ["malloc", device, len] => {
                return self.device_malloc(number(device), number(len)).to_string();
            }
            ["memory", device, kind, len] => {
                let (device, kind, len) = (number(device), number(kind) as u32, number(len));
                return self.other_memory(device, kind, len).to_string();
            }
            _ => panic!("no command: {text}"),
        }
        String::new()
    }

    /// One line each: `violation ID text`, `leak what count` (what is there, and what contexts had left when they were
    /// destroyed), `note what count`, `call name count`, `flags name flags count` (how often a call was made with these
    /// flags); and `over` when every context that was retained was released, or was to be.
    pub fn report(&self) -> String {
        let retained: usize = self.devices.iter().filter_map(|d| d.primary).map(|(_, count)| count).sum();
        let more = [
            ("registrations", self.registered.len()),
            ("graphs", self.graphs.count()),
            ("objects", self.graphs.objects()),
        ];
        let there = [("contexts", retained)].into_iter().chain(self.owned(None)).chain(more);
        // Counts though the call may have failed: releasing is the last call that a program makes.
        let over = self.made("cuDevicePrimaryCtxRelease_v2") >= self.retains;
        let mut all = self.common.report(there, over);
        for ((name, flags), count) in &self.hosts.flags {
            let _ = writeln!(all, "flags {name} {flags} {count}");
        }
        all
    }
}

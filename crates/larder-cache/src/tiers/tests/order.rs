//! What begins before what: the device is given what it has before the link is given more.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::*;

/// What was asked for, in order.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<String>>>);

impl Heard {
    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device that says when a copy begins.
struct Telling {
    device: DeviceDouble,
    heard: Heard,
}

impl Device for Telling {
    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> Result<(), DeviceError> {
        self.device.allocate(slots, slot_bytes)
    }

    fn submit(&mut self, transfer: Transfer) {
        self.heard.lock().push(format!("copy {}", transfer.direction));
        self.device.submit(transfer);
    }

    fn poll(&mut self) -> Option<Transferred> {
        self.device.poll()
    }

    fn wait(&mut self) -> Option<Transferred> {
        self.device.wait()
    }

    fn in_flight(&self) -> usize {
        self.device.in_flight()
    }
}

impl Work for Heard {
    fn host(&mut self, _: &ExpertLayout, experts: &[(ExpertId, &[u8])]) -> Option<Duration> {
        let mut heard = self.lock();
        heard.extend(experts.iter().map(|(expert, _)| format!("{expert} on the host")));
        None
    }

    fn device(&mut self, _: &ExpertLayout, experts: &[(ExpertId, SlotIndex)]) -> Option<Duration> {
        let mut heard = self.lock();
        heard.extend(experts.iter().map(|(expert, _)| format!("{expert} on the device")));
        None
    }
}

#[test]
fn what_is_on_the_device_is_computed_before_copies_begin() {
    let mut heard = Heard::default();
    let equip = |device| Telling { device, heard: heard.clone() };
    let mut bench = Bench::with(&setting(CacheScope::Layer, 2, 4), COPY, "lru", |m| m, equip).unwrap();
    (0..3).for_each(|expert| bench.visit(0, &[expert], 1).unwrap());
    heard.lock().clear();
    let wanted = [0, 2].map(|expert| Wanted { expert: ExpertId(expert), tokens: 1 });
    bench.cache.visit(LayerIdx(0), &wanted, &[], &mut heard).unwrap();
    let expected = ["expert 2 on the device", "copy into", "expert 0 on the device"];
    assert_eq!(heard.lock()[..], expected.map(String::from));
    assert!(bench.is_on_device(0, 2), "its slot was not taken for the other");
}
